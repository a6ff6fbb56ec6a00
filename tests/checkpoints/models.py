"""Random models of a few kilobytes, made in the test: what people merge, in the formats they have it in."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 36
_TEXT = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama(tied: bool = False, seed: int = 0, vocabulary: int = VOCABULARY, layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, num_key_value_heads=1, tie_word_embeddings=tied, max_position_embeddings=32,
        **_TEXT | _IDS | {"num_hidden_layers": layers},
    )  # fmt: skip
    return _seeded(lambda: LlamaForCausalLM(config), seed)


def t5(seed: int = 0, **more: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        **more,
    )
    return _seeded(lambda: T5ForConditionalGeneration(config), seed)


def t5_1_1(seed: int = 0) -> nn.Module:
    """Shared embeddings, and a head that is not tied to them."""
    model: Any = t5(seed, tie_word_embeddings=False)
    model.lm_head.weight = nn.Parameter(
        torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(seed))
    )
    return model


def bert(seed: int = 0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, **_TEXT)
    return _seeded(lambda: BertForMaskedLM(config), seed)


def gpt2(seed: int = 0, tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, tie_word_embeddings=tied, **_IDS
    )
    return _seeded(lambda: GPT2LMHeadModel(config), seed)


def clip(seed: int = 0) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = _TEXT | _IDS | {"vocab_size": VOCABULARY, "max_position_embeddings": 12}
    vision = _TEXT | {"image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return _seeded(lambda: CLIPModel(config), seed)


OPEN_CLIP: dict[str, Any] = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 8, "layers": 2, "width": 64, "patch_size": 4, "head_width": 32},
    "text_cfg": {"context_length": 8, "vocab_size": VOCABULARY, "width": 16, "heads": 2, "layers": 2},
}


def open_clip_model(seed: int = 0) -> nn.Module:
    import open_clip

    return _seeded(lambda: open_clip.CLIP(**OPEN_CLIP), seed)


def _seeded(make: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def tuned(model: nn.Module, seed: int, scale: float = 0.02) -> nn.Module:
    """The same model after some training: every parameter a little elsewhere, tied ones together."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def save(model: nn.Module, folder: Path, shard: str = "20KB") -> Path:
    """As `transformers` saves it, in several shards, with a tokenizer beside it."""
    model.save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder, [f"t{row}" for row in range(VOCABULARY)])
    return folder


def write_tokenizer(folder: Path, tokens: list[str]) -> None:
    """A word-level tokenizer with these tokens in order, as `transformers` saves one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({token: row for row, token in enumerate(tokens)}, unk_token=tokens[0]))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token=tokens[0]).save_pretrained(folder)


def write_tensors_of(model: nn.Module, folder: Path, tokens: list[str]) -> Path:
    """A folder with its own vocabulary."""
    model.save_pretrained(folder)
    write_tokenizer(folder, tokens)
    return folder


def three(make: Any, folder: Path) -> tuple[Path, dict[str, Path]]:
    """A base and the experts `cars` and `svhn`, as folders."""
    base = save(make(), folder / "base")
    return base, {name: save(tuned(make(), seed), folder / name) for name, seed in (("cars", 1), ("svhn", 2))}
