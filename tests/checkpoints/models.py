"""Random models of a few kilobytes, made in the test: what people merge, in the formats they have it in."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 36
_TEXT = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def make_llama(tied: bool = False, seed: int = 0, vocabulary: int = VOCABULARY, layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, num_key_value_heads=1, tie_word_embeddings=tied, max_position_embeddings=32,
        **_TEXT | _IDS | {"num_hidden_layers": layers},
    )  # fmt: skip
    return _make_seeded(lambda: LlamaForCausalLM(config), seed)


def make_t5(seed: int = 0, **more: Any) -> nn.Module:
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
    return _make_seeded(lambda: T5ForConditionalGeneration(config), seed)


def make_t5_1_1(seed: int = 0) -> nn.Module:
    """Shared embeddings, and a head that is not tied to them."""
    model: Any = make_t5(seed, tie_word_embeddings=False)
    model.lm_head.weight = nn.Parameter(
        torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(seed))
    )
    return model


def make_bert(seed: int = 0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, **_TEXT)
    return _make_seeded(lambda: BertForMaskedLM(config), seed)


def make_vit(seed: int = 0) -> nn.Module:
    """Whose files have the names of an earlier release, with a head of its own."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**_TEXT, image_size=8, patch_size=4, num_labels=3)
    return _make_seeded(lambda: ViTForImageClassification(config), seed)


def make_text_classifier(seed: int = 0) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, **_TEXT)
    return _make_seeded(lambda: BertForSequenceClassification(config), seed)


def make_bart() -> Any:
    """Whose encoder's names are among those of its decoder."""
    from transformers import BartConfig, BartForConditionalGeneration

    each = {"layers": 1, "ffn_dim": 24, "attention_heads": 2}
    sizes = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in each.items()}
    config = BartConfig(vocab_size=VOCABULARY, d_model=16, max_position_embeddings=16, **sizes)
    return _make_seeded(lambda: BartForConditionalGeneration(config), 0)


def make_two_berts() -> Any:
    """An encoder, and a decoder that is another model of the encoder's class with a head."""
    from transformers import EncoderDecoderConfig, EncoderDecoderModel

    config = EncoderDecoderConfig.from_encoder_decoder_configs(make_bert().config, make_bert().config)
    return _make_seeded(lambda: EncoderDecoderModel(config), 0)


def make_gpt2(seed: int = 0, tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, tie_word_embeddings=tied, **_IDS
    )
    return _make_seeded(lambda: GPT2LMHeadModel(config), seed)


def clip(seed: int = 0) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = _TEXT | _IDS | {"vocab_size": VOCABULARY, "max_position_embeddings": 12}
    vision = _TEXT | {"image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return _make_seeded(lambda: CLIPModel(config), seed)


OPEN_CLIP: dict[str, Any] = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 8, "layers": 2, "width": 64, "patch_size": 4, "head_width": 32},
    "text_cfg": {"context_length": 8, "vocab_size": VOCABULARY, "width": 16, "heads": 2, "layers": 2},
}


def open_clip_model(seed: int = 0) -> nn.Module:
    import open_clip

    return _make_seeded(lambda: open_clip.CLIP(**OPEN_CLIP), seed)


TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def save_siglip(folder: Path, text: int = 16) -> Path:
    """A folder with two towers of the same shapes, unless the text's is wider inside."""
    from transformers import SiglipConfig, SiglipModel

    words = dict(TOWER, vocab_size=48, max_position_embeddings=8, bos_token_id=1, eos_token_id=2)
    config = SiglipConfig(
        text_config=words | {"intermediate_size": text + 8, "projection_size": 16},
        vision_config=dict(TOWER, image_size=16, patch_size=8),
    )
    torch.manual_seed(0)
    SiglipModel(config).save_pretrained(folder)
    return folder


def make_gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sees = TOWER | {"num_hidden_layers": 1, "image_size": 16, "patch_size": 8, "vision_use_head": False}
    config = Gemma3Config(
        text_config=dict(TEXT, head_dim=4), vision_config=sees, mm_tokens_per_image=4, image_token_index=60,
        boi_token_index=61, eoi_token_index=62,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForConditionalGeneration(config).eval()


def make_qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    sees = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=dict(TEXT, rope_parameters=rope), vision_config=sees, image_token_id=60, video_token_id=61,
        vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(config).eval()


def make_mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**TEXT, num_local_experts=3, num_experts_per_tok=2)
    torch.manual_seed(0)
    return MixtralForCausalLM(config).eval()


def make_granite_moe() -> Any:
    """Whose stacks have other names in its files than in memory."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    config = GraniteMoeConfig(**TEXT, num_local_experts=3, num_experts_per_tok=2)
    torch.manual_seed(0)
    return GraniteMoeForCausalLM(config).eval()


def _make_seeded(make: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def tune(model: nn.Module, seed: int, scale: float = 0.02) -> nn.Module:
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


def save_three(make: Any, folder: Path) -> tuple[Path, dict[str, Path]]:
    """A base and the experts `cars` and `svhn`, as folders."""
    base = save(make(), folder / "base")
    return base, {name: save(tune(make(), seed), folder / name) for name, seed in (("cars", 1), ("svhn", 2))}
