"""Merge a run's experts in memory, and describe what decides the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.digests import read_version
from mergekit_lab.merging import Method, merge_state_dicts
from mergekit_lab.merging.inputs import Source
from mergekit_lab.prefetch import prefetch
from mergekit_lab.runs.curvature import declare_side_input, describe_own_inputs, list_kinds, make_own_sides
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.runs.nodes import Node
from mergekit_lab.runs.own_code import describe_code
from mergekit_lab.runs.run import MODEL, HeldKey, Run, State, move_state


def list_merge_inputs(run: Run, merger: Merger) -> tuple[Node, ...]:
    """What a merger reads: all experts, and their side inputs."""
    sides = [declare_side_input(run, kind, task) for kind in list_kinds(merger.method) for task in run.experts]
    return (*(declare_expert(run, task) for task in run.experts), *sides)


def describe_merge(run: Run, merger: Merger, method: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What decides a merge of the run's experts.

    Args:
        method: the method's configuration, if it is not the merger's own.
    """
    experts = {task: declare_expert(run, task).key for task in run.experts}
    content = {
        "base": run.base_content,
        "finetuning": run.plain["finetuning"],
        "order": list(experts),
        "experts": experts,
        "method": merger.content if method is None else method,
    }
    for kind in list_kinds(merger.method):
        content[f"{kind}s"] = {task: declare_side_input(run, kind, task).key for task in run.experts}
    return content | describe_own_inputs(run, merger.method) | describe_code(content["method"])


def merge_experts(
    run: Run,
    method: Method,
    tasks: Iterable[str] | None = None,
    notes: dict[str, dict[str, object]] | None = None,
    *,
    stays: bool = False,
) -> dict[str, Any]:
    """The state dict that a method makes of the run's experts, or of those of some tasks.

    Args:
        stays: let the inputs stay on the run's device for the next merge, see `move_models`. The result is then
            on that device too.
    """
    names = list(run.experts if tasks is None else tasks)
    experts: dict[str, Any] = {task: run.need(declare_expert(run, task)).find_file(MODEL) for task in names}
    statistics: dict[str, Mapping[str, Any]] = {
        kind: {
            task: run.need(declare_side_input(run, kind, task)).find_file(f"{kind}.safetensors")
            for task in names
        }
        for kind in list_kinds(method)
    }
    own_sides = make_own_sides(run, method, experts)
    base: Source = run.base_state
    files = [*experts.values(), *(file for by_task in statistics.values() for file in by_task.values())]
    if stays and (moved := move_models(run, files)):
        base, held = moved
        experts = {task: held[file] for task, file in experts.items()}
        statistics = {k: {t: held[file] for t, file in files.items()} for k, files in statistics.items()}
    return merge_state_dicts(
        base, experts, method, statistics={**statistics, **own_sides}, device=run.devices, notes=notes
    )


_READERS = 8
"""Files that are read at once."""


def move_models(run: Run, files: Sequence[Path]) -> tuple[State, dict[Path, State]] | None:
    """Read the base and these files onto the run's device, and keep them there for later merges.

    They are kept in `run.moved`. What only earlier merges read is dropped if there is no room for it.

    Returns:
        The base, and the files' tensors by path. None if merges should read their inputs from files: on a CPU,
        with several devices, or if the inputs take too much of the device's memory.
    """
    moved, keys = run.moved, {file: (file, read_version(file)) for file in files}
    wanted: set[HeldKey] = {None, *keys.values()}
    sizes = {key: _measure(state) for key, state in moved.items()}
    room = run.read_room(sum(sizes.values())) if len(run.devices) == 1 else 0
    missing = [key for key in wanted if key not in moved]
    sizes |= {key: key[0].stat().st_size if key else _measure(run.base_state) for key in missing}
    if sum(sizes[key] for key in wanted) > room:
        return None
    if sum(sizes.values()) > room:
        for key in moved.keys() - wanted:
            del moved[key]

    def move(key: HeldKey) -> State:
        return move_state(open_checkpoint(key[0]) if key else run.base_state, run.device)

    try:
        moved.update(zip(missing, prefetch(move, missing, ahead=_READERS, threads=_READERS), strict=True))
    except torch.OutOfMemoryError:
        moved.clear()
        torch.cuda.empty_cache()
        return None
    return moved[None], {file: moved[key] for file, key in keys.items()}


def _measure(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())
