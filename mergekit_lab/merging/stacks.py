"""Tensors that hold the matrices of a mixture's experts: `[E, out, in]`, or `[E, in, out]`.

transformers 5 has them so in memory, and many models on disk. They are known by their names, because 1-D
convolutions have such shapes, too: three dimensions right under `experts`, or an `input_linear` or
`output_linear` (GraniteMoE, JetMoe). Two dimensions are the experts' biases. A method that looks at matrices
(`Method.by_matrix`) gets the members one by one, under the names that they have in a file with a tensor for
each expert: both layouts of a model merge to the same.

A `gate_up_proj` `[E, 2·m, n]` is two matrices an expert, the gate's rows before the others'. Stored as
`[E, n, 2·m]`, which no such file has, it is one: gpt-oss interleaves the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_STACK = re.compile(r"(?P<parent>(?:.*[._])?experts)\.(?P<leaf>(?!\d+\.).+)")
_LINEAR = re.compile(r"(?P<parent>.*)\.(?P<leaf>(?:input|output)_linear\.weight)")


@dataclass(frozen=True)
class Stack:
    """One tensor's members, end to end in memory.

    Attributes:
        members: their names.
        shape: of each: `[m, n]`, or `[n]` of biases.
        transposed: whether they are stored as [in, out].
    """

    members: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False


def find_stacks(shapes: Mapping[str, Sequence[int]]) -> dict[str, Stack]:
    """The stacks among tensors of these names and shapes."""
    stacks = {}
    for name, shape in shapes.items():
        match = _STACK.fullmatch(name) or _LINEAR.fullmatch(name)
        if match is None or len(shape) not in (2, 3) or (len(shape) == 2) != name.endswith("bias"):
            continue
        parent, leaf = match["parent"], match["leaf"]
        transposed = len(shape) == 3 and _is_transposed(parent, shapes)
        module, kind = _split_leaf(leaf)
        count, *each = shape
        parts = [module]
        if module.endswith("gate_up_proj") and len(shape) == 3 and not transposed and each[0] % 2 == 0:
            parts = [module.removesuffix("gate_up_proj") + part for part in ("gate_proj", "up_proj")]
            each[0] //= 2
        members = tuple(f"{parent}.{number}.{part}.{kind}" for number in range(count) for part in parts)
        stacks[name] = Stack(members, tuple(each), transposed)
    return stacks


def _split_leaf(leaf: str) -> tuple[str, str]:
    """The module and the kind of parameter that a stack's name says."""
    for kind in ("weight", "bias"):
        for end in (f".{kind}", f"_{kind}"):
            if leaf.endswith(end):
                return leaf.removesuffix(end), kind
    return leaf, "weight"


def _is_transposed(parent: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a mixture's experts are stored as [in, out]: what one projection gives the other takes."""
    up, down = (tuple(shapes.get(f"{parent}.{name}_proj", ())) for name in ("gate_up", "down"))
    return len(up) == len(down) == 3 and up[1] == down[2] and up[2] == 2 * down[1]
