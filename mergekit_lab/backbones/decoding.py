"""Greedy answers of language models, by transformers' own loop, or by one here for models without a cache.

Legend: N prompts, L tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def unwrap_model(model: nn.Module) -> Any:
    """The model of transformers inside peft's or a linearized one, or `model` itself."""
    plain: Any = getattr(model, "_orig_mod", model)  # inside a compiled one
    return plain.get_base_model() if hasattr(plain, "get_base_model") else plain


def decode(
    model: nn.Module, tokens: Tensor, mask: Tensor, *, max_new_tokens: int, end: int | None, pad: int
) -> Tensor:
    """Append the likeliest token until `end`, or an end of the model's own.

    Args:
        model: decoder-only or encoder-decoder.
        tokens, mask: prompts, int64 `[N, L]`, padded at their start for a decoder-only model.
        max_new_tokens: the most tokens of an answer, ≥ 1.
        end: the tokenizer's; None if it has none.
        pad: the token after an end.

    Returns:
        int64 `[N, ≤ max_new_tokens]`. With an encoder, the decoder's first token comes before them.
    """
    settings: Any = unwrap_model(model).generation_config
    own = settings.eos_token_id
    stop = sorted({*(own if isinstance(own, list) else [own]), end} - {None})
    if hasattr(model, "generate"):
        return _decode_by_transformers(model, tokens, mask, max_new_tokens, stop, pad)
    if unwrap_model(model).config.is_encoder_decoder:
        first = torch.full_like(tokens[:, :1], settings.decoder_start_token_id)
        row, inputs = first, {"input_ids": tokens, "attention_mask": mask}
    else:
        row, inputs = tokens, {}
    read, done = row.shape[1], torch.zeros(len(row), dtype=torch.bool, device=row.device)
    for _ in range(max_new_tokens):
        if inputs:
            logits = model(**inputs, decoder_input_ids=row).logits[:, -1]
        else:
            positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
            logits = model(input_ids=row, attention_mask=mask, position_ids=positions).logits[:, -1]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        new = logits.argmax(dim=1).masked_fill(done, pad)
        row = torch.cat([row, new[:, None]], dim=1)
        done |= torch.isin(new, torch.tensor(stop, device=new.device, dtype=new.dtype))
        if done.all():
            break
    return row if inputs else row[:, read:]


def _decode_by_transformers(
    model: Any, tokens: Tensor, mask: Tensor, max_new_tokens: int, stop: list[int], pad: int
) -> Tensor:
    from transformers import GenerationConfig

    inner = unwrap_model(model)
    settings = inner.generation_config
    plain = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop or None,
        pad_token_id=pad,
        decoder_start_token_id=settings.decoder_start_token_id,
        bos_token_id=settings.bos_token_id,
    )
    inner.generation_config = plain  # transformers fills what a call leaves open from here
    try:
        answers: Tensor = model.generate(input_ids=tokens, attention_mask=mask, generation_config=plain)
    finally:
        inner.generation_config = settings
    return answers if inner.config.is_encoder_decoder else answers[:, tokens.shape[1] :]
