"""What others need to know of attention: which weights are its projections, which path it takes."""

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

    By name, as open_clip, timm, torch and transformers call them: a projection's name, somewhere below a module
    whose name has "attn" or "attention" in it.
    """
    return [name for name, p in model.named_parameters() if p.ndim == 2 and _is_projection(name)]


def _is_projection(name: str) -> bool:
    *path, leaf = name.split(".")
    if leaf in _PACKED:
        return True
    return (
        leaf == "weight" and path[-1:] != [] and path[-1] in _PROJECTIONS and any(map(_ATTENTION.search, path))
    )


def keep_differentiable(model: nn.Module) -> None:
    """Keep torch's own attention on the training path, which is the same function where it has no dropout.

    In evaluation mode it may pick a fused kernel without a derivative under `torch.func` transforms.
    """
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module.dropout == 0:
            module.training = True


def leave_out_cudnn() -> None:
    """Let this process compute attention by any of torch's kernels but cuDNN's, which recent GPUs prefer.

    Under a mask, a token that may see nothing, as padding at a prompt's start, comes out of it as NaN, and so
    does every token after it, for a weight of 0 keeps a NaN. Its gradients are NaN at some lengths, too
    (pytorch/pytorch, issue 196678). For the whole process: a backward pass may compute a forward pass again.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
