"""The report of `dry_run=true`: what a merge of checkpoints would read, do and need, from headers alone.

Time is an order of magnitude: the method's on a few small made-up tensors is scaled to the model's sizes, and
reading and writing are assumed to have a fixed rate. Memory is the most that the driver holds.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mergekit_lab.checkpoints import Checkpoint, TensorSpec, list_mismatches, refuse_quantized
from mergekit_lab.checkpoints.inspection import Report, describe_inputs, describe_model, describe_tensors
from mergekit_lab.checkpoints.publish import check_out
from mergekit_lab.checkpoints.shards import plan_shards
from mergekit_lab.checkpoints.tied_weights import find_configured_ties
from mergekit_lab.checkpoints.vocabulary import list_vocabulary_names
from mergekit_lab.commands.prepared import Prepared, plan_output
from mergekit_lab.commands.write import check_room, list_input_files, plan_files_beside
from mergekit_lab.errors import InputError, say_bytes, say_duration
from mergekit_lab.machine import count_free_bytes
from mergekit_lab.merging import (
    CAT,
    TIES,
    Method,
    merge_state_dicts,
    plan_factors,
    require_factors,
    resolve_device,
)
from mergekit_lab.merging.blocks import CPU_BLOCK, DEVICE_BLOCK
from mergekit_lab.merging.inputs import check_same_names, explain_missing_side, make_filter, select_tensors
from mergekit_lab.merging.jobs import FEEDERS, STACK_BYTES
from mergekit_lab.merging.selection import WIDE
from mergekit_lab.merging.spectral import SpectralMethod, explain_shapes
from mergekit_lab.merging.subspace import SubspaceMethod

T = TypeVar("T")
_BYTES_A_SECOND = 1e9
_BLOCK = 1 << 20
_SIDES = (96, 192)
_LAYER = re.compile(r"\.\d+\.")


def report(prepared: Prepared, out: Path | None, overwrite: bool = False, format: str = "dense") -> Report:
    """Report what the merge would read, do and need, and what prevents it."""
    result = Report()
    result.add_section("Inputs", describe_inputs(prepared.origin, prepared.opened))
    result.add_section("Base", [*describe_model(prepared.base), *describe_tensors(prepared.base)])
    if prepared.notes:
        result.add_section("Adjusted", prepared.notes)
    result.problems += prepared.problems
    if out is None:
        result.problems.append("out is not set: out=<folder>")
    else:
        _try(result, check_out, out.expanduser(), overwrite, list_input_files(prepared))
    for device in prepared.device:
        _try(result, resolve_device, device)
    for checkpoint in (prepared.base, *prepared.experts.values()):
        _try(result, refuse_quantized, checkpoint)
    merged = _list_merged(prepared, result)
    ties = find_configured_ties(prepared.base, read=False)
    resized = list_vocabulary_names(prepared.base, prepared.experts.values())  # a problem already
    compared = {*merged} - {*resized}
    matters = make_filter(prepared.base.specs, ties, compared, prepared.include, prepared.left_out)
    wanted = matters(prepared.base.specs)
    for name, expert in prepared.experts.items():
        result.problems += [f"{name} {fault}" for fault in list_mismatches(wanted, matters(expert.specs))]
    _try(result, plan_files_beside, prepared, format)
    _try(result, prepared.method.check, tuple(prepared.experts))
    _check_sides(prepared, merged, result)
    specs, limit, stem = plan_output(prepared.base, prepared.dtype, list(ties), prepared.max_shard_bytes)
    kept = len(specs) - len(merged)
    factored = format in ("low_rank", "per_task")
    stored = _plan_factors(prepared, merged) if factored else specs  # an adapter takes less
    shards = (_try(result, plan_shards, stored, limit, stem) or []) if stored else []
    written = sum(shard.nbytes for shard in shards)
    if out is not None:
        _try(result, check_room, out, written)
    result.add_section(
        "Result",
        [
            f"{len(stored)} tensors in {len(shards)} files, {say_bytes(written)} of disk",
            f"{len(merged)} tensors are merged by {type(prepared.method).__name__}, {kept} stay the base's",
            *explain_shapes(prepared.method, {n: s.shape for n, s in prepared.base.specs.items()}, set(merged)),
            f"{say_bytes(count_free_bytes(out))} of disk are free at {out}" if out else "no out=… is set",
        ],
    )
    result.add_section(
        "Needs",
        [*_describe_memory(prepared, specs, merged), _describe_seconds(prepared, merged, written, result)],
    )
    return result


def _plan_factors(prepared: Prepared, merged: Sequence[str]) -> dict[str, TensorSpec]:
    shapes = {name: prepared.base.specs[name].shape for name in merged}
    method = require_factors(prepared.method, prepared.method.by_task)
    return plan_factors(shapes, len(prepared.experts), method, _find_dtype(prepared))


def _find_dtype(prepared: Prepared) -> torch.dtype:
    """The dtype of the arithmetic."""
    specs = (spec for c in (prepared.base, *prepared.experts.values()) for spec in c.specs.values())
    return torch.float64 if any(spec.dtype == torch.float64 for spec in specs) else torch.float32


def _try(result: Report, step: Callable[..., T], *arguments: Any) -> T | None:
    """The result of a step of the merge itself. If the step refuses, note the problem and return None."""
    try:
        return step(*arguments)
    except InputError as error:
        result.problems.append(str(error))
        return None


def _check_sides(prepared: Prepared, merged: Sequence[str], result: Report) -> None:
    method, base = prepared.method, prepared.base.specs
    for kind in method.side_inputs:
        if kind not in prepared.side:
            result.problems.append(explain_missing_side(method, kind))
            continue
        own = {n: base[n] for n in merged if method.name_side(kind, n) == n}
        if own:
            for name, side in prepared.side[kind].items():
                specs = {n: spec for n, spec in side.specs.items() if n in own or n not in base}
                result.problems += [f"the {kind} of {name} {fault}" for fault in list_mismatches(own, specs)]
        else:
            sides = tuple(prepared.side[kind].values())
            _try(result, check_same_names, prepared.base, method, kind, sides)


def _list_merged(prepared: Prepared, result: Report) -> list[str]:
    ties, experts = find_configured_ties(prepared.base, read=False), prepared.experts.values()
    specs, patterns = prepared.base.specs, (prepared.include, prepared.left_out)
    selected = _try(result, select_tensors, specs, ties, *patterns, experts)
    if selected is not None:
        _try(result, prepared.method.check_tensors, selected)
    return list(selected or ())


_FIXED = 4 << 20
"""Of a merge whatever its size: threads and their first buffers."""
_COUNTERS = 8 << 20
"""What counting the entries of one expert takes, where there are many of them."""


def _describe_memory(prepared: Prepared, specs: dict[str, TensorSpec], merged: Sequence[str]) -> list[str]:
    """Upper bounds of what is held at once. experiments/merge_engine/README.md measures the host's memory."""
    experts, method = len(prepared.experts), prepared.method
    sizes = [specs[name].numel for name in merged if name in specs]
    largest = max(sizes, default=0)
    item = _find_dtype(prepared).itemsize
    stored = max((spec.nbytes for spec in specs.values()), default=0)
    workers = torch.get_num_threads() if method.elementwise else 1
    counters = 0
    if isinstance(getattr(method, "inner", method), TIES) and sum(sizes) > WIDE:
        counters = 2 * workers * experts * _COUNTERS
    whole = (2 * experts + 16) * max(largest, _find_largest_square(prepared, merged)) * item
    blocks = workers * min(largest, CPU_BLOCK) * item * (8 * experts + 4)
    adapters = sum(_is_finer(checkpoint, prepared.base, merged) for checkpoint in prepared.experts.values())
    folded = 3 * largest * item * adapters
    results = (2 * workers + 4) * stored
    held = _FIXED + results + folded + (blocks + counters if method.elementwise else whole)
    if set(prepared.device) == {"cpu"}:
        device = "no device memory: the arithmetic is on the CPU"
    else:
        taken = _estimate_device_memory(prepared, sizes, item, whole) + counters
        device = f"device memory: about {say_bytes(taken)}"
    return [f"host memory: at most {say_bytes(held)} above start-up, without mapped files", device]


def _find_largest_square(prepared: Prepared, merged: Sequence[str]) -> int:
    """The entries of the largest matrix `[out, out]` or `[in, in]` that the method makes, or 0."""
    if not isinstance(prepared.method, CAT | SubspaceMethod):
        return 0
    shapes = [s for n in merged if len(s := prepared.base.specs[n].shape) == 2]
    sides = [(side, len(prepared.experts) * other) for m, n in shapes for side, other in ((m, n), (n, m))]
    return max((side * min(side, others) for side, others in sides), default=0)


def _estimate_device_memory(prepared: Prepared, sizes: Sequence[int], item: int, whole: int) -> float:
    """The memory of one accelerator that several workers feed. To factorize a stack of matrices was measured to
    take ten times its size. Matrices that are too large to be stacked take less."""
    experts, method, largest = len(prepared.experts), prepared.method, max(sizes, default=0)
    if method.elementwise:
        block = min(sum(sizes) if method.pools else largest, DEVICE_BLOCK // 2) * item * (3 * experts + 4)
        kept = 0 if method.pools else min(largest * item * (experts + 1), STACK_BYTES)
        return FEEDERS * (block + kept)
    if isinstance(method, SpectralMethod):
        stack = max(largest * item * experts, min(sum(sizes) * item * experts, STACK_BYTES))
        return 10 * min(stack, STACK_BYTES) + 2.5 * max(0, stack - STACK_BYTES) + 2 * stack
    return whole


def _describe_seconds(prepared: Prepared, merged: Sequence[str], written: int, result: Report) -> str:
    read = sum(os.path.getsize(file) for c in (prepared.origin, *prepared.opened.values()) for file in c.files)
    moved = (read + written) / _BYTES_A_SECOND
    sizes = [prepared.base.specs[name].numel for name in merged]
    files_alone = f"time: about {say_duration(moved)} of reading and writing"
    if not sizes or result.problems:
        return files_alone
    try:
        arithmetic = _try(result, _estimate_arithmetic, prepared, merged, sizes)
    except Exception as error:  # a method may fail on made-up tensors; an estimate is no reason to
        return f"{files_alone}, arithmetic unknown ({type(error).__name__})"
    if arithmetic is None:
        return files_alone
    rate = f"{say_duration(arithmetic)} of arithmetic, {say_duration(moved)} of disk at 1 GB/s"
    return f"time: about {say_duration(max(moved, arithmetic))} ({rate})"


def _is_finer(checkpoint: Checkpoint, base: Checkpoint, names: Sequence[str]) -> bool:
    """Whether folding an adapter makes tensors in more bits than the base's."""
    shared = [name for name in names if name in checkpoint]
    return any(checkpoint.specs[n].dtype.itemsize > base.specs[n].dtype.itemsize for n in shared)


def _estimate_arithmetic(prepared: Prepared, merged: Sequence[str], sizes: Sequence[int]) -> float:
    """Seconds for all tensors: per entry for elementwise methods, else by a power law through two sizes."""
    specs = prepared.base.specs
    method = prepared.method

    def rank(name: str) -> tuple[bool, bool, bool, int]:
        """How well a tensor represents the others."""
        shape = specs[name].shape
        factorized = isinstance(method, SpectralMethod) and method.is_matrix(name, shape)
        return factorized, bool(_LAYER.search(name)), len(shape) == 2, specs[name].numel

    name = max(merged, key=rank)
    device = prepared.device[0]
    if method.elementwise:
        return _time_merge(method, name, (_BLOCK,), list(prepared.experts), device) / _BLOCK * sum(sizes)
    small, large = (_time_merge(method, name, (n, n), list(prepared.experts), device) for n in _SIDES)
    growth = math.log(max(large / small, 1.0)) / math.log((_SIDES[1] / _SIDES[0]) ** 2)
    power = min(max(growth, 1.0), 1.5)
    return sum(large * (size / _SIDES[1] ** 2) ** power for size in sizes)


def _time_merge(
    method: Method, name: str, shape: tuple[int, ...], experts: Sequence[str], device: str
) -> float:
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=generator)}
    others = {e: {name: base[name] + 0.01 * torch.randn(shape, generator=generator)} for e in experts}
    statistics = {}
    for kind in method.side_inputs:
        key = method.name_side(kind, name)
        statistics[kind] = [
            {} if key is None else {key: _draw_side_input(shape, key == name, generator)} for _ in experts
        ]
    plain = _drop_weights(method)
    seconds = []
    for _ in range(2):
        begun = time.monotonic()
        merge_state_dicts(base, others, plain, statistics=statistics, device=device)
        seconds.append(time.monotonic() - begun)
    return min(seconds)


def _drop_weights(method: Method) -> Method:
    """The method, and its inner one, without weights, which may name tensors that the trial does not have."""
    inner = getattr(method, "inner", None)
    changes: dict[str, Any] = (
        {"inner": _drop_weights(inner)} if isinstance(inner, Method) else {"weights": None}
    )
    return replace(method, **changes)


def _draw_side_input(shape: tuple[int, ...], alike: bool, generator: torch.Generator) -> Tensor:
    """A Fisher shaped like the tensor, or a Gram of its inputs."""
    if alike:
        return torch.rand(shape, generator=generator)
    return torch.eye(shape[-1]) + torch.rand((), generator=generator)
