"""Merged models stored as factors of what is added to the base, or as masks of it, expanded as they are read.

A folder holds `factors.safetensors` (sharded where it is large) and `low_rank.json`, which says what they
belong to. Every expert's share is apart, so any of them can be left out.

Legend: `T` experts, `m×n` a matrix, `p` atoms of it, `p/T` an expert, `α` the coefficient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from mergekit_lab.checkpoints.card import fingerprint
from mergekit_lab.checkpoints.casting import FLOATING, cast
from mergekit_lab.checkpoints.checkpoint import Checkpoint, Computed
from mergekit_lab.checkpoints.files import Safetensors, open_index
from mergekit_lab.checkpoints.inspection import plan_specs
from mergekit_lab.checkpoints.plain_files import read_json
from mergekit_lab.errors import InputError, join_names, name_in_errors, suggest
from mergekit_lab.ranges import check_settings, require

RECORD_FILE = "low_rank.json"
LEFT, RIGHT, COORDINATES = ".u", ".v", ".coordinates"
PARTS, DIVISOR = ".parts", ".divisor"
SHARED, MASKS, RESCALERS = ".shared", ".masks", ".rescalers"
_KINDS = (LEFT, RIGHT, COORDINATES, PARTS, DIVISOR, SHARED, MASKS, RESCALERS)


def count_bytes(shape: Sequence[int]) -> int:
    """The bytes of a tensor's mask, at one bit per entry."""
    return -(-math.prod(shape) // 8)


@dataclass(frozen=True)
class LowRankRecord:
    """What stored factors belong to.

    Attributes:
        experts: their names, in the order of the atoms.
        coefficient: `α`.
        dtype: of the expanded floating-point tensors; None: the base's own.
        tied: second names of weights, each with the first.
        base: its fingerprint.
    """

    experts: Sequence[str]
    coefficient: float
    dtype: str | None
    tied: Mapping[str, str]
    base: Mapping[str, Any]

    stem: ClassVar[str] = "factors"

    def make_files(self) -> dict[str, str]:
        """Files that are stored with the factors."""
        return {RECORD_FILE: json.dumps(asdict(self), indent=1) + "\n"}

    @classmethod
    def read(cls, folder: Path) -> LowRankRecord:
        """Read the record of a folder.

        Raises:
            InputError: it cannot be read, or is not what `write` leaves.
        """
        content = read_json(folder / RECORD_FILE)
        try:
            record = cls(**content)
            check_settings(cls, vars(record))
            require(record.dtype in (None, *FLOATING), "dtype", record.dtype, "a floating-point dtype, or null")
            require(_is_fingerprint(record.base), "base", record.base, "a fingerprint")
        except (TypeError, InputError) as error:
            raise InputError(f"{folder / RECORD_FILE} is damaged, or not a merge's ({error})") from None
        return record


def _is_fingerprint(print_: object) -> bool:
    if not isinstance(print_, dict) or not {"layout_sha256", "label"} <= print_.keys():
        return False
    try:
        return all(isinstance(size, int) and isinstance(name, str) for size, name in _list_hashes(print_))
    except (AttributeError, KeyError, TypeError):
        return False


class LowRank(Computed):
    """A base with low-rank factors added.

    Attributes:
        coefficient: `α`.
        dtype: of the floating-point tensors; None: the base's own.

    Args:
        folder: the factors.
        base: what they were made on.
        label: what messages call the result.
        tasks: the experts whose shares are added; None: all.
        coefficient: `α` in place of the stored one.

    Raises:
        InputError: another base, an unknown expert, damaged files.
    """

    def __init__(
        self,
        folder: Path,
        base: Checkpoint,
        label: str,
        tasks: Sequence[str] | None = None,
        coefficient: float | None = None,
    ) -> None:
        with name_in_errors(label):
            self.record = LowRankRecord.read(folder)
        _check_base(self.record.base, base, label)
        unknown = [task for task in tasks or () if task not in self.record.experts]
        if unknown:
            near = suggest(unknown[0], self.record.experts)
            raise InputError(f"{label} has no share of {join_names(unknown)}{near}")
        require(coefficient is None or math.isfinite(coefficient), "coefficient", coefficient, "finite")
        file = folder / f"{LowRankRecord.stem}.safetensors"
        index = file.with_name(f"{file.name}.index.json")
        sharded = index.is_file()
        self._factors = open_index(label, index) if sharded else Safetensors(label, [file])
        if tasks is not None and len(tasks) != 1 and any(name.endswith(MASKS) for name in self._factors):
            raise InputError(f"{label} has one model per task: name one task in tasks=[…]")
        self._tasks = None if tasks is None else [list(self.record.experts).index(task) for task in tasks]
        self.coefficient = self.record.coefficient if coefficient is None else coefficient
        self._base = base
        self.dtype: torch.dtype | None = getattr(torch, self.record.dtype) if self.record.dtype else None
        _check_factors(label, self._factors, base, len(self.record.experts))
        super().__init__(label, plan_specs(base, self.dtype), self._factors.files, base.folder)

    def find_ties(self) -> dict[str, str]:
        return dict(self.record.tied)

    def compute(self, name: str) -> Tensor:
        base, dtype = self._base[name], self.specs[name].dtype
        delta = self._expand(self.record.tied.get(name, name))
        if delta is None or self.coefficient == 0:
            return cast(name, base, dtype)
        exact = torch.float64 if dtype == torch.float64 else delta.dtype
        expanded = torch.add(base.to(exact), delta.to(exact), alpha=self.coefficient)
        if not bool(expanded.isfinite().all()):
            raise InputError(
                f"{self.label}: {name} comes out with NaN or infinite entries: its factors are damaged"
            )
        return cast(name, expanded, dtype)

    def _expand(self, name: str) -> Tensor | None:
        """The merged task vector at `α = 1`; None where nothing is added."""
        factors = {kind: self._factors.get(name + kind) for kind in _KINDS}
        shared, masks, rescalers = (factors[kind] for kind in (SHARED, MASKS, RESCALERS))
        if shared is not None and masks is not None and rescalers is not None:
            return shared if self._tasks is None else _mask_expert(shared, masks, rescalers, self._tasks[0])
        left, right, coordinates = (factors[kind] for kind in (LEFT, RIGHT, COORDINATES))
        if left is not None and right is not None and coordinates is not None:
            left, right, coordinates = (self._choose(x, -1) for x in (left, right, coordinates))
            lifted = (left.double() * coordinates.double()) @ right.double().mT
            return lifted.to(left.dtype)
        parts, divisor = factors[PARTS], factors[DIVISOR]
        if parts is None or divisor is None:
            return None
        return self._choose(parts, 0).sum(dim=0) / divisor

    def _choose(self, values: Tensor, dim: int) -> Tensor:
        """The chosen experts' equal shares of a dimension."""
        if self._tasks is None:
            return values
        shares = values.tensor_split(len(self.record.experts), dim=dim)
        return torch.cat([shares[t] for t in self._tasks], dim=dim)


def _mask_expert(shared: Tensor, masks: Tensor, rescalers: Tensor, task: int) -> Tensor:
    """One expert's part of the shared task vector, `[*S]`."""
    bits = torch.from_numpy(numpy.unpackbits(masks[task].cpu().numpy(), count=shared.numel()))
    return shared * bits.to(shared).view(shared.shape) * rescalers[task]


def _check_factors(label: str, factors: Checkpoint, base: Checkpoint, experts: int) -> None:
    """Refuse a tensor with some of its factors, or with factors of shapes that do not fit."""
    known: set[str] = set()
    for name, spec in base.specs.items():
        stored = {kind: factors.specs.get(name + kind) for kind in _KINDS}
        held = {kind: factor.shape for kind, factor in stored.items() if factor is not None}
        atoms = held.get(COORDINATES, (0,))[0]
        matrix = {LEFT: (*spec.shape[:1], atoms), RIGHT: (*spec.shape[1:], atoms), COORDINATES: (atoms,)}
        whole = {PARTS: (experts, *spec.shape), DIVISOR: ()}
        masked = {SHARED: spec.shape, MASKS: (experts, count_bytes(spec.shape)), RESCALERS: (experts,)}
        fits = held in (whole, masked) or (held == matrix and atoms % max(experts, 1) == 0)
        real = all(
            factor.dtype == torch.uint8 if kind == MASKS else factor.dtype.is_floating_point
            for kind, factor in stored.items()
            if factor is not None
        )
        if held and not (fits and real and spec.dtype.is_floating_point):
            raise InputError(f"{label}: the factors of {name} do not make a tensor of shape {list(spec.shape)}")
        known |= {name + kind for kind in held}
    if factors.keys() - known:
        raise InputError(
            f"{label} holds factors of tensors the base lacks ({join_names(factors.keys() - known)})"
        )


def _check_base(wanted: Mapping[str, Any], base: Checkpoint, label: str) -> None:
    actual = fingerprint(base)
    hashes, others = _list_hashes(wanted), _list_hashes(actual)
    if wanted["layout_sha256"] != actual["layout_sha256"] or (hashes and others and hashes != others):
        raise InputError(f"{label} holds factors for another base ({wanted['label']}), not {base.label}")


def _list_hashes(print_: Mapping[str, Any]) -> list[tuple[int, str]]:
    files = print_.get("files", {}).values()
    return sorted((file["bytes"], file.get("sha256") or file["sampled_sha256"]) for file in files)
