"""What the tape does at each function: the result, and how to get each sample's gradient from what enters it.

A rule takes the tape and the function's own arguments. Functions without one get `make_local_rule`.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mergekit_lab.curvature.tape import Tape, find_tensors
from mergekit_lab.curvature.uses import Convolution, Local, Lookup, MatrixProduct, Ready, Use

BROADCASTING = {Tensor.__add__, Tensor.add, torch.add, Tensor.__mul__, Tensor.mul, torch.mul}


def _record_linear(tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    tape.require(tape.has_rows(input) and not tape.is_batched(weight), input, weight, bias)
    return _record_product(
        tape, functional.linear(input, tape.detach(weight), tape.detach(bias)), input, weight, bias
    )


def _matmul(tape: Tape, input: Tensor, other: Tensor) -> Tensor:
    if not (tape.is_source(other) and other.dim() == 2 and tape.has_rows(input)):
        return make_local_rule(torch.matmul)(tape, input, other)
    return _record_product(tape, torch.matmul(input, other.detach()), input, other, None, flipped=True)


def _addmm(tape: Tape, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: float) -> Tensor:
    if scales:
        return make_local_rule(torch.addmm)(tape, input, mat1, mat2, **scales)
    known = tape.has_rows(mat1) and not tape.is_batched(mat2) and input.dim() == 1
    tape.require(known, input, mat1, mat2)
    out = torch.addmm(tape.detach(input), mat1, tape.detach(mat2))
    return _record_product(tape, out, mat1, mat2, input, flipped=True)


def _record_product(
    tape: Tape, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, flipped: bool = False
) -> Tensor:
    a = input.detach()
    out = tape.watch(
        out,
        (weight, lambda g: MatrixProduct(tape.view_rows(a), tape.view_rows(g), flipped)),
        (bias, lambda g: Ready(tape.view_rows(g).sum(dim=1))),
    )
    if not tape.is_aligned(input):
        out._flattened = True  # type: ignore[attr-defined]
    return out


def _record_embedding(
    tape: Tape, input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **named: Any
) -> Tensor:
    tape.require(tape.is_aligned(input), weight)
    out = functional.embedding(input, weight.detach(), padding_idx, *rest, **named)
    rows = weight.shape[0]
    index = input.reshape(input.shape[0], -1)

    def use(g: Tensor) -> Use:
        g = g.reshape(*index.shape, -1)
        if padding_idx is not None:
            g = g.masked_fill((index == padding_idx % rows)[..., None], 0)
        return Lookup(index, g, rows)

    return tape.watch(out, (weight, use))


def _record_conv2d(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if groups != 1 or isinstance(padding, str) or not tape.is_aligned(input):
        return make_local_rule(functional.conv2d)(tape, input, weight, bias, stride, padding, dilation, groups)
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    out = functional.conv2d(input, tape.detach(weight), tape.detach(bias), **options)
    x = input.detach()
    return tape.watch(
        out,
        (weight, lambda g: Convolution(x, g, weight.shape, options)),
        (bias, lambda g: Ready(g.sum(dim=(2, 3)))),
    )


def _make_norm_rule(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule for `layer_norm` or `rms_norm`, which take what they multiply and add by these names."""
    parameters = signature(norm)

    def record(tape: Tape, *args: Any, **kwargs: Any) -> Tensor:
        call = parameters.bind(*args, **kwargs).arguments
        shape, weight, bias = call["normalized_shape"], call.get("weight"), call.get("bias")
        tape.require(tape.is_aligned(call["input"]), call["input"], weight, bias)
        out = norm(**_replace(call, tape.detach))
        plain = {name: value for name, value in call.items() if name not in ("weight", "bias")}
        plain["input"] = call["input"].detach()
        return tape.watch(
            out,
            (weight, lambda g: Ready(_sum_positions(g * norm(**plain), shape))),
            (bias, lambda g: Ready(_sum_positions(g, shape))),
        )

    return record


def make_local_rule(func: Any) -> Callable[..., Tensor]:
    """The rule for every function without one: its own derivative, sample by sample, in one batched call."""

    def record(tape: Tape, *args: Any, **kwargs: Any) -> Tensor:
        tensors = find_tensors(*args, *kwargs.values())
        sources = list({id(t): t for t in tensors if tape.is_source(t)}.values())
        batched = list({id(t): t for t in tensors if tape.is_batched(t)}.values())
        tape.require(all(tape.is_aligned(t) for t in batched), *sources)
        out = func(*_replace(args, tape.detach), **_replace(kwargs, tape.detach))
        tape.require(_is_per_sample(tape, func, args, kwargs, out, batched), *sources)

        def use(source: Tensor) -> Callable[[Tensor], Use]:
            def compute(s: Tensor, *samples: Tensor) -> Tensor:
                values = {id(t): x for t, x in zip(batched, samples, strict=True)} | {id(source): s}

                def put(value: Any) -> Any:
                    return values[id(value)] if id(value) in values else tape.detach(value)

                result: Tensor = func(*_replace(args, put), **_replace(kwargs, put))
                return result

            plain = [t.detach() for t in batched]
            return lambda g: Local(compute, source.detach(), plain, g)

        return tape.watch(out, *((source, use(source)) for source in sources))

    return record


def _is_per_sample(
    tape: Tape, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, batched: Sequence[Tensor]
) -> bool:
    """Whether the function does to a sample alone what it does to it among others; tried on the first."""
    if not isinstance(out, Tensor) or out.dim() == 0 or len(out) != tape.samples:
        return False
    if func in BROADCASTING and out.dim() == max(t.dim() for t in batched):
        return True

    def take_first(value: Any) -> Any:
        return value[:1] if any(value is t for t in batched) else tape.detach(value)

    try:
        one = func(*_replace(args, take_first), **_replace(kwargs, take_first))
        return one.shape == out[:1].shape and torch.allclose(one, out[:1], rtol=1e-3, atol=1e-5)
    except (RuntimeError, TypeError, IndexError):
        return False


RULES: dict[Any, Callable[..., Tensor]] = {
    functional.linear: _record_linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    functional.embedding: _record_embedding,
    functional.conv2d: _record_conv2d,
    functional.layer_norm: _make_norm_rule(functional.layer_norm),
    functional.rms_norm: _make_norm_rule(functional.rms_norm),
}


def _sum_positions(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """`[N, …, *shape]` summed over the positions: `[N, *shape]`."""
    return tensor.reshape(tensor.shape[0], -1, *shape).sum(dim=1)


def _replace(value: Any, put: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_replace(item, put) for item in value)
    if isinstance(value, dict):
        return {key: _replace(item, put) for key, item in value.items()}
    return put(value)
