"""Find tensors that stack the matrices of a mixture's experts: `[E, out, in]` or `[E, in, out]`.

transformers 5 keeps them so in memory, and many models on disk. A method that looks at matrices
(`Method.by_matrix`) gets the members one by one, under the names that they have in files with one tensor for
each expert. So both layouts of a model merge to the same weights.

Stacks are recognized by name, because 1-D convolutions have such shapes too:

- a 3-D tensor directly under `experts` or MLX's `switch_mlp`; a 2-D one there holds the experts' biases,
- a 3-D `down_proj`, `up_proj`, … or an `input_linear` or `output_linear` (GraniteMoE, JetMoe),
- DBRX's `[E·m, n]`, the experts' matrices below each other.

A `gate_up_proj` `[E, 2·m, n]` is two matrices for each expert, the gate's rows first. So is an `input_linear`
with twice as many outputs as its `output_linear` has inputs. Stored as `[E, n, 2·m]` it counts as one matrix,
because gpt-oss interleaves the two.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_STACK = re.compile(r"(?P<parent>(?:.*[._])?(?:experts|switch_mlp))\.(?P<leaf>(?!\d+\.).+)")
_LINEAR = re.compile(
    r"(?P<parent>.*)\.(?P<leaf>(?:(?:input|output)_linear|(?:gate|up|gate_up|down)_proj)\.weight)"
)
_LEAF = re.compile(r"(.*)[._](weight|bias)")
"""A module's name, and the kind of its parameter."""
_DBRX = re.compile(r"(?P<block>.*)\.experts\.mlp\.(?P<leaf>w1|v1|w2)")
_PAIRS = {"gate_up_proj": "down_proj", "input_linear": "output_linear", "fc1": "fc2"}
"""The projections of a mixture's experts: up (with the gate, where there is one) and down."""


@dataclass(frozen=True)
class Stack:
    """The matrices in one tensor, end to end in memory.

    Attributes:
        members: the names of the matrices.
        shape: the shape of each: `[m, n]`, or `[n]` for biases.
        transposed: whether they are stored as [in, out].
    """

    members: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False


def find_stacks(shapes: Mapping[str, Sequence[int]]) -> dict[str, Stack]:
    """The stacks among all tensors of a model. Some are recognized by the shapes of others."""
    stacks = {}
    for name, shape in shapes.items():
        stack = _find_stack(name, shape, shapes) or _find_flat_stack(name, shape, shapes)
        if stack is not None:
            stacks[name] = stack
    return stacks


def _find_stack(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> Stack | None:
    match = _STACK.fullmatch(name) or _LINEAR.fullmatch(name)
    if match is None or len(shape) not in (2, 3) or (len(shape) == 2) != name.endswith("bias"):
        return None
    leaf = _LEAF.fullmatch(match["leaf"])
    module, kind = leaf.groups() if leaf else (match["leaf"], "weight")
    count, *each = shape
    parts = [module]
    gated, transposed = _find_layout(match["parent"], module, shapes) if len(shape) == 3 else (False, False)
    if gated and module.endswith(("gate_up_proj", "input_linear")):
        before = module.removesuffix("gate_up_proj").removesuffix("input_linear")
        parts = [f"{before}gate_proj", f"{before}up_proj"]
        each[0] //= 2
    elif gated and module.endswith("output_linear"):
        parts = [f"{module.removesuffix('output_linear')}down_proj"]
    members = tuple(f"{match['parent']}.{number}.{part}.{kind}" for number in range(count) for part in parts)
    return Stack(members, tuple(each), transposed)


def _find_flat_stack(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> Stack | None:
    """DBRX's stacks: the rows of all experts below each other. Members get the names of Mixtral's."""
    match = _DBRX.fullmatch(name)
    router = shapes.get(f"{match['block']}.router.layer.weight", ()) if match else ()
    if match is None or len(shape) != 2 or not router or shape[0] % router[0]:
        return None
    leaf = {"v1": "w3"}.get(match["leaf"], match["leaf"])
    members = tuple(f"{match['block']}.experts.{number}.{leaf}.weight" for number in range(router[0]))
    return Stack(members, (shape[0] // router[0], shape[1]), transposed=leaf == "w2")


def _find_layout(parent: str, module: str, shapes: Mapping[str, Sequence[int]]) -> tuple[bool, bool]:
    """Whether the up projection contains the gate, with its rows first; and whether both are stored [in, out].

    Both follow from shapes: the up projection's outputs are the down projection's inputs.
    """
    for first, second in _PAIRS.items():
        if module.endswith((first, second)):
            before = f"{parent}.{module.removesuffix(first).removesuffix(second)}"
            up, down = (
                tuple(shapes.get(f"{before}{name}", shapes.get(f"{before}{name}.weight", ())))
                for name in (first, second)
            )
            both = len(up) == len(down) == 3
            transposed = both and up[1] == down[2] and up[2] == 2 * down[1]
            upright = both and up[2] == down[1] and up[1] == 2 * down[2]
            alone = first == "gate_up_proj" and not both and up[1:] and up[1] % 2 == 0
            return upright or bool(alone), transposed
    return False, False
