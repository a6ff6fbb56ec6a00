"""Attention: which weights are its projections, and which kernels compute it."""

import re

import torch
from torch import nn

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_PROJECTIONS = {
    *("q", "k", "v", "o", "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv", "qkv_proj", "proj"),
    *("query", "key", "value", "dense", "query_key_value", "c_attn", "c_proj", "q_lin", "k_lin", "v_lin"),
    *("out_lin", "Wqkv", "Wo"),
}
_PACKED = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def list_attention_weights(model: nn.Module) -> list[str]:
    """Names of the query, key, value and output matrices of all attention in `model`.

    They are found by the names of open_clip, timm, torch and transformers: a projection's name below a module
    whose name contains "attn" or "attention".
    """
    return [name for name, p in model.named_parameters() if p.ndim == 2 and _is_projection(name)]


def _is_projection(name: str) -> bool:
    *path, leaf = name.split(".")
    is_known = leaf == "weight" and not _PROJECTIONS.isdisjoint(path[-1:])
    return leaf in _PACKED or (is_known and any(map(_ATTENTION.search, path)))


def keep_differentiable(model: nn.Module) -> None:
    """Keep torch's own attention on its training path, which computes the same without dropout.

    In evaluation mode torch may choose a fused kernel that `torch.func` cannot differentiate.
    """
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module.dropout == 0:
            module.training = True


def leave_out_cudnn() -> None:
    """Exclude cuDNN's attention, which recent GPUs prefer, from this process's kernels.

    It returns NaN for a token whose mask allows nothing, such as padding at a prompt's start. Tokens after it
    become NaN too, because 0 · NaN is NaN. At some lengths its gradients are NaN (pytorch/pytorch, issue
    196678). The setting is process-wide, because a backward pass may recompute a forward pass.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
