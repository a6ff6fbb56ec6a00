"""`torch.nn.functional.multi_head_attention_forward` in steps that a function mode can see.

torch's own runs its projections inside one call, where nothing watches them. Same results, for what models use:
see `is_supported`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ATTENTION = functional.multi_head_attention_forward


def is_supported(
    query: Tensor,
    bias_k: Tensor | None,
    add_zero_attn: bool,
    dropout: float,
    **rest: Any,
) -> bool:
    """Batched inputs, no learned or zero keys, no static keys, no active dropout."""
    static = rest.get("static_k") is not None or rest.get("static_v") is not None
    return query.dim() == 3 and bias_k is None and not add_zero_attn and dropout == 0 and not static


def run_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The arguments are torch's. Inputs are `[L, N, E]`, samples second; projections see `[N, L, E]`.

    Raises:
        NotImplementedError: what `is_supported` leaves out.
    """
    dropout = dropout_p if training else 0.0
    if not is_supported(query, bias_k, add_zero_attn, dropout, static_k=static_k, static_v=static_v):
        raise NotImplementedError
    same = query is key and key is value
    x = query.transpose(0, 1)
    if use_separate_proj_weight:
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    elif not same:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    if same and not use_separate_proj_weight:
        assert in_proj_weight is not None
        q, k, v = functional.linear(x, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        inputs = (x, key.transpose(0, 1), value.transpose(0, 1))
        q, k, v = (functional.linear(*each) for each in zip(inputs, weights, biases, strict=True))
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, q)
    if need_weights:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        chances = (scores if mask is None else scores + mask).softmax(dim=-1)
        out = chances @ v
    else:
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal and mask is None)
    out = functional.linear(out.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return out, None
    return out, chances.mean(dim=1) if average_attn_weights else chances


def _mask(mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as one that is added to the scores `[N, H, L, S]`; True means: not to be looked at."""
    if mask is not None:
        mask = _to_additive(mask, q)
        mask = mask.view(-1, q.shape[1], *mask.shape[1:]) if mask.dim() == 3 else mask
    if padding is None:
        return mask
    padding = _to_additive(padding, q)[:, None, None]
    return padding if mask is None else mask + padding


def _to_additive(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))
