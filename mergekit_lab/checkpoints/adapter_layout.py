"""Whether a base stores a weight as [out, in], or as [in, out] like GPT-2's Conv1D.

Shapes tell unless the matrix is square: a bias has one entry per output, and an adapter's factors say how many
outputs there are. peft's `fan_in_fan_out` tells less, because an adapter has one for all modules, that of the
last that peft met. A square matrix is taken to be stored as others of its kind, whose names end alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mergekit_lab.checkpoints.checkpoint import Checkpoint
from mergekit_lab.checkpoints.tied_weights import read_config
from mergekit_lab.errors import InputError

_CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
_TRANSPOSED_STACKS = {"gpt_oss", "aria", "aria_text", "openai_privacy_filter"}
_CONV1D = {"c_attn", "c_proj", "c_fc", "q_attn"}


class Layout(NamedTuple):
    """The outputs and inputs of a matrix, and the shape in which it is stored."""

    outputs_inputs: tuple[int, int]
    shape: tuple[int, ...]

    @property
    def transposed(self) -> bool | None:
        """Whether it is stored as [in, out]. None if it is square."""
        return None if len(set(self.shape)) == 1 else self.outputs_inputs != self.shape


def find_transposed(
    base: Checkpoint, layouts: Mapping[str, Layout], configured: bool, version: str = ""
) -> set[str]:
    """The adapted matrices that `base` stores as [in, out].

    Args:
        layouts: of every adapted matrix, by its name in the base.
        configured: the adapter's `fan_in_fan_out`.
        version: of the peft that wrote it.

    Raises:
        InputError: nothing tells for a square matrix.
    """
    stacks = {
        name: layout for name, layout in layouts.items() if name in base and len(base.specs[name].shape) == 3
    }
    single = {name: layout for name, layout in layouts.items() if name not in stacks}
    known = {name: layout.transposed for name, layout in single.items() if layout.transposed is not None}
    square = [name for name in single if name not in known]
    seen = {**_compare_biases(base), **known} if square else known
    conv1d = read_config(base.folder).get("model_type") in _CONV1D_MODELS
    names = {name for name, transposed in known.items() if transposed}
    for name in square:
        alike = {transposed for other, transposed in seen.items() if _name_kind(other) == _name_kind(name)}
        votes = (
            alike
            if len(alike) == 1
            else {_name_kind(name) in _CONV1D}
            if conv1d
            else {configured, *seen.values()}
        )
        if len(votes) != 1:
            raise InputError(
                f"{name} is square, and nothing tells whether it is stored as [out, in] or [in, out] "
                "(the adapter has one fan_in_fan_out for modules of both): merge it with peft and give the "
                "saved model"
            )
        if True in votes:
            names.add(name)
    return names | _find_transposed_stacks(base, stacks, version)


def _find_transposed_stacks(base: Checkpoint, layouts: Mapping[str, Layout], version: str) -> set[str]:
    """The adapted stacks of matrices whose factors were made for [in, out].

    For this peft asks the model's class. Before 0.21 it may have looked at the shape alone.
    """
    known = {layout.transposed for layout in layouts.values() if layout.transposed is not None}
    if not known and read_config(base.folder).get("model_type") in _TRANSPOSED_STACKS:
        known = {True}
    elif not known and _release(version) >= (0, 21):
        known = {False}
    square = [name for name, layout in layouts.items() if layout.transposed is None]
    if square and len(known) != 1:
        raise InputError(
            f"the matrices of {square[0]} are square, and nothing tells whether they are stored as "
            "[out, in] or [in, out]: merge it with peft and give the saved model"
        )
    return {name for name, layout in layouts.items() if layout.transposed or (name in square and True in known)}


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def find_conv1d_weights(base: Checkpoint) -> frozenset[str]:
    """The base's weights that are stored as [in, out].

    A square one is among them if others of its kind are, or if any weight is and Conv1D layers have its name.
    """
    known = _compare_biases(base)
    names = {name for name, transposed in known.items() if transposed}
    kinds = {_name_kind(name) for name in names} | (_CONV1D if names else set())
    square = {name for name, spec in base.specs.items() if len(spec.shape) == 2 and len(set(spec.shape)) == 1}
    return frozenset(
        names | {name for name in square if name.endswith(".weight") and _name_kind(name) in kinds}
    )


def _name_kind(name: str) -> str:
    return name.removesuffix(".weight").split(".")[-1]


def _compare_biases(base: Checkpoint) -> dict[str, bool]:
    """By name of each matrix that is not square and has a bias: whether it is stored as [in, out]."""
    transposed = {}
    for name, spec in base.specs.items():
        bias = base.specs.get(name.removesuffix("weight") + "bias")
        matrix = name.endswith(".weight") and len(spec.shape) == 2 and len(set(spec.shape)) == 2
        if matrix and bias and len(bias.shape) == 1:
            transposed[name] = bias.shape != spec.shape[:1]
    return transposed
