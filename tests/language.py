"""Tiny language models and text tasks that tests of several rooms share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from mergekit_lab.backbones import LanguageModel
from mergekit_lab.backbones.language import load_tokenizer
from mergekit_lab.tasks import Part, TextSamples, TextTask

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_byte_tokenizer() -> Any:
    """A token a byte, and four of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<pad>"])
    byte_level = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<pad>")
    byte_level.chat_template = CHAT
    return byte_level


def make_tiny_config(architecture: str) -> Any:
    from transformers import LlamaConfig, Qwen2Config, T5Config

    shape = {
        "vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "eos_token_id": 256, "pad_token_id": 259, "bos_token_id": None,
    }  # fmt: skip
    if architecture == "llama":
        return LlamaConfig(**shape, tie_word_embeddings=True)
    if architecture == "qwen2":
        return Qwen2Config(**shape, tie_word_embeddings=False)
    return T5Config(
        vocab_size=260, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, dropout_rate=0.0,
        decoder_start_token_id=259, eos_token_id=256, pad_token_id=259,
    )  # fmt: skip


def save_tiny(folder: Path, architecture: str, dtype: torch.dtype = torch.float32) -> Path:
    """A folder as transformers writes it: a tiny random Llama, Qwen2 or T5 with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    loader = AutoModelForSeq2SeqLM if architecture == "t5" else AutoModelForCausalLM
    model = loader.from_config(make_tiny_config(architecture), dtype=dtype)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    if architecture == "t5":
        model.lm_head.weight = torch.nn.Parameter(torch.randn(260, 16, dtype=dtype))
    model.save_pretrained(folder)
    if (
        architecture == "t5"
    ):  # as Flan-T5's own: transformers 5 ties it, and forgets in saving that logits are not scaled
        file = folder / "config.json"
        config = json.loads(file.read_text()) | {"tie_word_embeddings": False}
        file.write_text(json.dumps({n: v for n, v in config.items() if n != "scale_decoder_outputs"}))
    make_byte_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_backbone(folder: Path, architecture: str, **options: Any) -> LanguageModel:
    seq2seq = architecture == "t5"
    options = {"prompt": "plain" if seq2seq else "chat", "max_length": 96} | options
    return LanguageModel(source=str(folder), kind="seq2seq" if seq2seq else "causal", **options)


@dataclass(frozen=True)
class Colors(TextTask):
    """Says whether a color is warm."""

    name: str = "colors"
    choices: tuple[str, ...] | None = ("no", "yes", "no idea")
    max_new_tokens: int = 5
    size: int = 24

    def make(self, part: Part) -> TextSamples:
        shift = {"train": 0, "validation": 3, "test": 6}[part]
        colors = ("red", "blue", "a very pale orange", "the green of old copper", "yellow", "gray")
        index = [(i * 5 + shift) % 6 for i in range(self.size)]
        answers = ("yes", "no", "yes", "no idea", "yes", "no")
        return TextSamples(
            tuple(f"Is {colors[i]} number {n} warm?" for n, i in enumerate(index)),
            tuple(answers[i] for i in index),
        )


def compute_loss(backbone, architecture, prompt, answer, all_tokens=False):
    """The summed loss of one sample, without padding, straight from its text."""
    model, tok = backbone.make_model(), load_tokenizer(backbone.source)
    ids = lambda text: torch.tensor([tok(text, add_special_tokens=False).input_ids])  # noqa: E731
    target = torch.cat([ids(answer), torch.tensor([[256]])], dim=1)
    with torch.no_grad():
        if architecture == "t5":
            logits = model(input_ids=ids(prompt), labels=target).logits[0]
            return functional.cross_entropy(logits, target[0], reduction="sum")
        shown = ids(f"<|user|>{prompt}<|end|><|assistant|>")
        row = torch.cat([shown, target], dim=1)
        losses = functional.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="none")
        return losses.sum() if all_tokens else losses[shown.shape[1] - 1 :].sum()
