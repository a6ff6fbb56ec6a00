"""`torch.nn.functional.multi_head_attention_forward` in steps that a function mode can see.

torch's own runs its projections inside one call, where nothing watches them. Same results, for what models use.
"""

from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ATTENTION = functional.multi_head_attention_forward
_SIGNATURE = signature(ATTENTION)


def run_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The arguments are torch's. Inputs are `[L, N, E]`, samples second; projections see `[N, L, E]`.

    Raises:
        NotImplementedError: inputs without a batch, learned or zero keys, static keys, active dropout.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    dropped = call.training and call.dropout_p != 0
    added = call.add_zero_attn or any(x is not None for x in (call.bias_k, call.static_k, call.static_v))
    if call.query.dim() != 3 or dropped or added:
        raise NotImplementedError
    separate = call.use_separate_proj_weight
    if call.query is call.key and call.key is call.value and not separate:
        x = call.query.transpose(0, 1)
        q, k, v = functional.linear(x, call.in_proj_weight, call.in_proj_bias).chunk(3, dim=-1)
    else:
        own = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
        weights = own if separate else call.in_proj_weight.chunk(3)
        biases: Any = (None, None, None) if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
        inputs = (x.transpose(0, 1) for x in (call.query, call.key, call.value))
        q, k, v = (functional.linear(*each) for each in zip(inputs, weights, biases, strict=True))
    q, k, v = (t.unflatten(-1, (call.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    mask = _mask(call.attn_mask, call.key_padding_mask, q)
    if call.need_weights:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        chances = (scores if mask is None else scores + mask).softmax(dim=-1)
        out = chances @ v
    else:
        causal = call.is_causal and mask is None
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    out = functional.linear(out.transpose(1, 2).flatten(2), call.out_proj_weight, call.out_proj_bias)
    out = out.transpose(0, 1)
    if not call.need_weights:
        return out, None
    return out, chances.mean(dim=1) if call.average_attn_weights else chances


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
