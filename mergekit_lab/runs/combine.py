"""A run's experts merged in memory, and what decides the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.merging import Method, merge_state_dicts
from mergekit_lab.merging.inputs import Source
from mergekit_lab.runs.curvature import declare_side_input, describe_own_inputs, list_kinds, make_own_sides
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.runs.nodes import Node
from mergekit_lab.runs.own_code import describe_code
from mergekit_lab.runs.run import MODEL, Run


def list_merge_inputs(run: Run, merger: Merger) -> tuple[Node, ...]:
    """What a merger reads: all experts, and their side inputs."""
    sides = [declare_side_input(run, kind, task) for kind in list_kinds(merger.method) for task in run.experts]
    return (*(declare_expert(run, task) for task in run.experts), *sides)


def describe_merge(run: Run, merger: Merger, method: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What decides a merge of the run's experts.

    Args:
        method: the method's configuration, where it is not the merger's own.
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
) -> dict[str, Any]:
    """The state dict that a method makes of the run's experts, or of those of some tasks."""
    names = list(run.experts if tasks is None else tasks)
    experts: dict[str, Path] = {task: run.need(declare_expert(run, task)).find_file(MODEL) for task in names}
    statistics: dict[str, Mapping[str, Source]] = {
        kind: {
            task: run.need(declare_side_input(run, kind, task)).find_file(f"{kind}.safetensors")
            for task in names
        }
        for kind in list_kinds(method)
    }
    statistics |= make_own_sides(run, method, experts)
    return merge_state_dicts(
        run.base_state, experts, method, statistics=statistics, device=run.devices, notes=notes
    )
