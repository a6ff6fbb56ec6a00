"""Random numbers that depend only on (seed, step), and offsets of weights made from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mergekit_lab.optim.precision import widen_dtype
from mergekit_lab.optim.sharded import find_first_entry, spread_like, take_part, take_parts
from mergekit_lab.triton_kernels import load_kernels

ENTRIES_PER_DRAW = 2**24


def hash_bits(seed: int, step: int, what: str) -> int:
    """Hash to 64 bits, for one purpose (`what`) of one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def to_signed(bits: int) -> int:
    """Reinterpret 64 bits as an int64."""
    return bits - (1 << 64) if bits >> 63 else bits


class Noise(NamedTuple):
    """A distribution of offsets.

    Attributes:
        distribution: `laplace` with mean `loc` and mean absolute deviation `scale`, or `gaussian` with mean
            `loc` and standard deviation `scale`. A negative `scale` mirrors the draws about `loc`.
    """

    distribution: str
    loc: float = 0.0
    scale: float = 1.0

    def draw(
        self, count: int, generator: torch.Generator, dtype: torch.dtype, factor: Tensor | None = None
    ) -> Tensor:
        """Draw `[count]` independent numbers on the generator's device.

        A Laplace draw is the difference of two exponential ones, which on a GPU takes a third of the memory
        traffic of inverting its distribution function. `factor`, a 0-d tensor on that device, multiplies draws.
        """
        draws = torch.empty(count, dtype=dtype, device=generator.device)
        if self.scale == 0:
            draws.fill_(self.loc)
        elif self.distribution == "gaussian":
            draws.normal_(generator=generator).mul_(self.scale)
        else:
            rate = 1 / abs(self.scale)
            other = torch.empty_like(draws)
            draws.exponential_(rate, generator=generator)
            other.exponential_(rate, generator=generator)
            draws = draws.sub_(other) if self.scale > 0 else other.sub_(draws)
        if self.loc and self.scale:
            draws.add_(self.loc)
        return draws if factor is None else draws.mul_(factor)


def draw_noise(
    params: list[Tensor], seed: int | torch.Generator, noise: Noise, factor: Tensor | None = None
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Draw noise for each parameter, entry by entry, a few parameters at a time.

    Args:
        params: any shapes and devices. Draws are float64 for float64 parameters, float32 for all others.
        seed: 64 bits. The same seed and layout of parameters give the same draws on one type of device. Or a
            seeded generator on the device of all parameters.
        factor: see `Noise.draw`.

    Yields:
        Parameters and their draws, pairwise of the same shape. Of sharded parameters both are this process's
        parts. Every process draws the whole, so parts equal those of an unsharded run.
    """

    @cache
    def find_generator(device: torch.device) -> torch.Generator:
        return seed if isinstance(seed, torch.Generator) else torch.Generator(device).manual_seed(seed)

    for group in _chunk(params):
        sizes = [p.numel() for p in group]
        draws = noise.draw(sum(sizes), find_generator(group[0].device), widen_dtype(group[0]), factor)
        pieces = zip(draws.split(sizes), group, strict=True)
        yield take_parts(group), [take_part(spread_like(piece.view(p.shape), p)) for piece, p in pieces]


def add_offset(params: list[Tensor], seed: int | torch.Generator, factor: float | Tensor, noise: Noise) -> None:
    """Add `factor` · z to `params` in place, z as `draw_noise` draws it.

    The sum is computed in z's precision and rounded once.
    """
    if isinstance(factor, Tensor):
        draws = draw_noise(params, seed, noise, factor)
    else:
        draws = draw_noise(params, seed, Noise(noise.distribution, factor * noise.loc, factor * noise.scale))
    for group, z in draws:
        torch._foreach_add_(group, z)


def load_move(params: Sequence[Tensor]) -> Any:
    """The Triton kernels that copy these weights and move them, or None if `draw_noise` must do it."""
    if not params or any(p.device.type != "cuda" or p.device != params[0].device for p in params):
        return None
    if any(widen_dtype(p) is not torch.float32 or find_first_entry(p) is None for p in params):
        return None
    return load_kernels(f"{__package__}.gpu_noise", "torch moves weights")


def save_and_move(
    kernels: Any, params: Sequence[Tensor], copies: Sequence[Tensor], seed: Tensor, factor: Tensor, noise: Noise
) -> None:
    """Copy weights and move them by `load_move`'s kernels; see `gpu_noise.save_and_move`.

    Draws differ from `draw_noise`'s. They depend on an entry's position in the whole model, so that every
    process makes those of its part.
    """
    first, entries = [], 0
    for p in params:
        first.append(entries + (find_first_entry(p) or 0))
        entries += -(-p.numel() // 4) * 4
    kernels.save_and_move(take_parts(params), take_parts(copies), first, seed, factor, noise)


def _chunk(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbors that share a device and precision, about `ENTRIES_PER_DRAW` entries at a time.

    One draw serves many small tensors; one draw for all would double the memory of a large model.
    """
    group: list[Tensor] = []
    entries = 0
    for p in params:
        traits = (p.device, widen_dtype(p))
        if group and (
            traits != (group[0].device, widen_dtype(group[0])) or entries + p.numel() > ENTRIES_PER_DRAW
        ):
            yield group
            group, entries = [], 0
        group.append(p)
        entries += p.numel()
    if group:
        yield group
