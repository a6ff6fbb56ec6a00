"""Samples as rows of tokens: padded to one length, or several in a row.

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
    """Rows of tokens as one tensor `[N, L]`, and a mask that is 1 at tokens."""
    tokens = pad_sequence(list(rows), True, value, "left" if left else "right")
    counts = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(tokens.shape[1]) < counts[:, None]).long()
    mask = mask.flip(1) if left else mask
    return (tokens, mask) if device is None else (tokens.to(device), mask.to(device))


def round_up(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, …: powers of 2 and what lies halfway between them."""
    power = 16
    while power < length:
        if 3 * power // 2 >= length:
            return 3 * power // 2
        power *= 2
    return power


def pack_first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Samples by row, of at most `room` tokens together: first-fit decreasing."""
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
    """Which tokens see which, bool `[N, 1, L, L]`: those before them of their own segment, and themselves."""
    length = segments.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & before)[:, None]


def mask_reach(model: Any) -> float:
    """How long a row may be for a model of transformers to see in it what a mask and positions of ours say.

    As long as one likes for most; as long as the window for one that looks back a window, which a mask of ours
    replaces; 0 where something else than attention carries a text on (state-space and convolution layers),
    where the model counts positions itself (ALiBi), and where attention adds a mask to its scores instead of
    choosing by it (any but torch's own).
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
