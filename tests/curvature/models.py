"""Small random models of each family with a batch each, and the dense Fisher that all are compared with."""

from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from checkpoints.models import clip, make_bert, make_gpt2, make_llama, make_t5
from torch import Tensor, nn
from torch.nn import functional

from mergekit_lab.batches import count_samples, take_samples
from mergekit_lab.curvature.likelihood import compute_logits, log_likelihood

SAMPLES = 5


@dataclass
class Case:
    """A model and a batch of five samples; `unused` names parameters that no logit depends on."""

    model: nn.Module
    batch: Any
    causal: bool = False
    unused: tuple[str, ...] = ()


def compute_dense(case: Case) -> dict[str, Tensor]:
    """The mean of squared gradients, one autograd pass a sample."""
    named = {n: p for n, p in case.model.named_parameters() if p.requires_grad}
    totals = {n: torch.zeros_like(p) for n, p in named.items()}
    count = count_samples(case.batch)
    case.model.eval()
    for at in range(count):
        value = log_likelihood(*compute_logits(case.model, take_samples(case.batch, at, at + 1), case.causal))
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        for name, g in zip(named, gradients, strict=True):
            totals[name] += 0 if g is None else g**2
    return {n: t / count for n, t in totals.items()}


def draw_noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _draw_tokens(length: int, seed: int = 2) -> Tensor:
    return torch.randint(3, 36, (SAMPLES, length), generator=torch.Generator().manual_seed(seed))


def _make_answers(tokens: Tensor) -> Tensor:
    """Labels with a masked prompt of a different length in every sample."""
    start = torch.arange(len(tokens))[:, None] + 1
    return torch.where(torch.arange(tokens.shape[1]) < start, -100, tokens)


class Tower(nn.Module):
    """An image tower with a frozen head, random to the last bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        cfg = {"layers": 2, "width": 24, "head_width": 12, "patch_size": 4, "image_size": 8}
        self.visual = open_clip.model._build_vision_tower(6, cfg)
        for p in self.visual.parameters():
            p.data += 0.1 * torch.randn_like(p)
        self.register_buffer("head", torch.randn(4, 6) * 3)

    def forward(self, images: Tensor) -> Tensor:
        return functional.normalize(self.visual(images), dim=-1) @ self.head.T


def make_vit() -> Case:
    return Case(Tower(), (draw_noise(SAMPLES, 3, 8, 8), torch.arange(SAMPLES) % 4))


class Encoder(nn.Module):
    """Hugging Face's vision tower of CLIP, whose class token has one dimension, with a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = clip()
        self.register_buffer("head", draw_noise(4, 8) * 3)
        for name, p in self.tower.named_parameters():
            nothing = name.endswith("k_proj.bias")  # which softmax does not see: rounding alone
            p.requires_grad_(name.startswith("vis") and not nothing)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.tower.vision_model(pixel_values=images).pooler_output
        return functional.normalize(self.tower.visual_projection(pooled), dim=-1) @ self.head.T


def make_hf_clip() -> Case:
    return Case(Encoder(), (draw_noise(SAMPLES, 3, 8, 8), torch.arange(SAMPLES) % 4))


def make_llama_case(tied: bool) -> Case:
    tokens = _draw_tokens(7)
    return Case(make_llama(tied=tied), {"input_ids": tokens, "labels": _make_answers(tokens)}, causal=True)


def make_padded_llama() -> Case:
    tokens = _draw_tokens(7)
    mask = (torch.arange(7) >= torch.tensor([0, 2, 0, 1, 3])[:, None]).long()
    labels = torch.where(mask == 0, -100, tokens)
    return Case(make_llama(), {"input_ids": tokens, "attention_mask": mask, "labels": labels}, causal=True)


def make_t5_case() -> Case:
    labels = _make_answers(_draw_tokens(4, seed=3)).roll(1, dims=1)
    return Case(make_t5(), {"input_ids": _draw_tokens(6), "labels": labels})


def make_bert_case() -> Case:
    return Case(make_bert(), {"input_ids": _draw_tokens(6), "labels": _make_answers(_draw_tokens(6))})


def make_square_bert() -> Case:
    """As many tokens as samples, so that no shape tells one from the other."""
    return Case(
        make_bert(), {"input_ids": _draw_tokens(SAMPLES), "labels": _make_answers(_draw_tokens(SAMPLES))}
    )


def make_gpt2_case() -> Case:
    """Its projections multiply flattened tokens."""
    tokens = _draw_tokens(5)
    return Case(make_gpt2(), {"input_ids": tokens, "labels": tokens}, causal=True)


CASES = {
    "open_clip ViT": make_vit,
    "Hugging Face's CLIP": make_hf_clip,
    "Llama": lambda: make_llama_case(False),
    "Llama, tied": lambda: make_llama_case(True),
    "Llama, padded": make_padded_llama,
    "T5": make_t5_case,
    "BERT": make_bert_case,
    "BERT, L = N": make_square_bert,
    "GPT-2": make_gpt2_case,
}
