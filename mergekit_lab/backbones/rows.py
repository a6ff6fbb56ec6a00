"""Samples as rows of tokens: padded to one length, or packed several to a row.

Legend: N samples or rows, L tokens of a row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def pad_rows(
    rows: Sequence[Tensor], value: int, device: torch.device | None = None, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Pad rows of tokens into one tensor `[N, L]`, with a mask that is 1 at tokens."""
    tokens = pad_sequence(list(rows), True, value, "left" if left else "right")
    counts = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(tokens.shape[1]) < counts[:, None]).long()
    mask = mask.flip(1) if left else mask
    return (tokens, mask) if device is None else (tokens.to(device), mask.to(device))


def round_up(length: int) -> int:
    """Round up to one of 16, 24, 32, 48, 64, 96, …: powers of 2 and the midpoints between them."""
    power = 16
    while power < length:
        if 3 * power // 2 >= length:
            return 3 * power // 2
        power *= 2
    return power


def pack_first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack samples into rows of at most `room` tokens, by first-fit decreasing."""
    bins: list[list[int]] = []
    free: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((b for b, left in enumerate(free) if left >= lengths[position]), None)
        if row is None:
            row = len(bins)
            bins.append([])
            free.append(room)
        bins[row].append(position)
        free[row] -= lengths[position]
    return bins


def mask_segments(segments: Tensor) -> Tensor:
    """Mask bool `[N, 1, L, L]`: a token sees itself and earlier tokens of its own segment."""
    length = segments.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & before)[:, None]


def mask_reach(model: Any) -> float:
    """How long a row may be for a model of transformers to obey our mask and positions.

    Most models set no limit. A model with sliding-window attention takes its window, because our mask replaces
    the window. The result is 0 if layers other than attention mix tokens (state space, convolution), if the
    model counts positions itself (ALiBi), or if its attention is not torch's own.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    if (
        config._attn_implementation != "sdpa"
        or "position_ids" not in inspect.signature(model.forward).parameters
        or getattr(config, "alibi", False)
        or getattr(model, "_is_stateful", False)
        or not _ATTENTION.issuperset(kinds)
    ):
        return 0
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((window for window in windows if window), default=math.inf)
