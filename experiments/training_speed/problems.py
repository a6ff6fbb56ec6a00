"""What is trained: image towers on random pictures, and a language model on random tokens."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from mergekit_lab.backbones import ImageObjective, OpenClip
from mergekit_lab.backbones.classification import Crops
from mergekit_lab.backbones.encoding import Encoded, Reading
from mergekit_lab.backbones.text import CausalObjective
from mergekit_lab.tasks import ImageSamples, ImageTask, Part, TextSamples, TextTask
from mergekit_lab.tasks.decoding import Pictures


@dataclass(frozen=True)
class RandomImages(ImageTask):
    """Random pictures in ten classes: squares of `side` pixels, or of many sizes that are cropped to it."""

    name: str = "random"
    side: int = 32
    size: int = 2048
    many_sizes: bool = False

    classes = tuple(f"class {n}" for n in range(10))
    templates = ("{}",)

    def make(self, part: Part) -> ImageSamples:
        count = self.size if part == "train" else 16
        generator = torch.Generator().manual_seed(len(part))
        labels = torch.arange(count) % 10
        if not self.many_sizes:
            shape = (count, 3, self.side, self.side)
            images = torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8)
            return ImageSamples(images + (12 * labels[:, None, None, None]).to(torch.uint8), labels)
        sizes = torch.randint(self.side, 3 * self.side // 2, (count, 2), generator=generator).numpy()
        data = torch.randint(0, 256, (int(3 * sizes.prod(1).sum()),), generator=generator, dtype=torch.uint8)
        return ImageSamples(Pictures(data, sizes, self.side), labels)


class Images:
    """An image tower of open_clip with a random head."""

    def __init__(self, name: str, weights: str | None, side: int, width: int, crop: bool, size: int) -> None:
        self.backbone = OpenClip(name, weights)
        self.task = RandomImages(side=side, many_sizes=crop, size=size)
        head = torch.randn(10, width, generator=torch.Generator().manual_seed(0)) * 3
        self.objective = ImageObjective(self.task, head, Crops((0.9, 1.0), False, side) if crop else None)

    def make_model(self) -> nn.Module:
        return self.backbone.make_model()


@dataclass(frozen=True)
class NoText(TextTask):
    """Stands for a text task, whose texts nobody reads."""

    name: str = "tokens"
    choices: tuple[str, ...] | None = None
    max_new_tokens: int = 2
    size: int = 2000

    def make(self, part: Part) -> TextSamples:
        texts = ("-",) * (self.size if part == "train" else 4)
        return TextSamples(texts, texts)


class Tokens(CausalObjective):
    """Random tokens: prompts of about the lengths of suite `text7` in chat form, short answers."""

    def __init__(self, vocabulary: int, longest: int) -> None:
        class Tokenizer:
            pad_token_id, eos_token_id = 0, 1

            def __len__(self) -> int:
                return vocabulary

        super().__init__(NoText(), Tokenizer(), Reading(prompt="plain", max_length=longest))
        self.vocabulary, self.longest = vocabulary, longest

    @lru_cache(maxsize=3)  # noqa: B019
    def encode(self, part: Part) -> Encoded:
        generator = torch.Generator().manual_seed(len(part))
        count = self.task.count(part)
        lengths = (
            torch.empty(count).log_normal_(4.3, 0.6, generator=generator).long().clamp(20, self.longest - 8)
        )

        def draw(length: int) -> Tensor:
            return torch.randint(2, self.vocabulary, (length,), generator=generator)

        answers = torch.randint(2, 7, (count,), generator=generator)
        return Encoded([draw(n) for n in lengths.tolist()], [draw(n) for n in answers.tolist()], (0, 0))

    def predict(self, model: nn.Module, part: Part, index: Tensor) -> list[str]:
        return [""] * len(index)

    def measure(self, predictions: Any, part: Part, index: Tensor) -> dict[str, float]:
        return {self.task.metric: 0.0}


class LanguageProblem:
    """A Llama of SmolLM2-135M's shape with random weights."""

    def __init__(self, small: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = (
            {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 32}
            if small
            else {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
                  "num_key_value_heads": 3, "intermediate_size": 1536}
        )  # fmt: skip
        torch.manual_seed(0)
        self.base = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
        self.objective = Tokens(shape["vocab_size"], 64 if small else 256)

    def make_model(self) -> nn.Module:
        return deepcopy(self.base)


BATCH = {"clip": 64, "vit_b32": 128, "smollm2": 16, "vit_l14": 64}
PRECISION = {"clip": "32-true", "vit_b32": "bf16-mixed", "smollm2": "bf16-mixed", "vit_l14": "bf16-mixed"}


@lru_cache(maxsize=1)
def make_problem(group: str, small: bool) -> Images | LanguageProblem:
    if group == "smollm2":
        return LanguageProblem(small)
    if group == "clip":
        return Images("glyph-clip", "asset:glyph_clip", 32, 64, False, 256 if small else 4096)
    if small:
        return Images("glyph-clip", None, 32, 64, True, 64)
    name, width = ("ViT-B-32-quickgelu", 512) if group == "vit_b32" else ("ViT-L-14-quickgelu", 768)
    return Images(name, None, 224, width, True, 1500)
