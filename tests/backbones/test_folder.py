"""GGUF files are read as the numbers that the format's own package makes of them, and written as folders."""

import json

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from mergekit_lab import InputError
from mergekit_lab.backbones import LanguageModel
from mergekit_lab.backbones.folder import main, write_folder
from mergekit_lab.backbones.language import load_tokenizer
from mergekit_lab.checkpoints import open_checkpoint

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

HEADS, KEYS = 4, 2
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
SHAPES = {
    "token_embd": (261, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
    "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
    "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A Llama of one block, its matrices in Q4_1, with a tokenizer of bytes and one merge."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    out, draw = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for name, value in {
        "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64,
        "head_count": HEADS, "head_count_kv": KEYS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0,
        "vocab_size": 261, "rope_dimension_count": 8, "tokenizer_model": "gpt2", "tokenizer_pre": "smollm",
        "token_list": [*sorted(pre_tokenizers.ByteLevel.alphabet()), "hi", "<|end|>", "<|user|>", "<|says|>",
                       "<pad>"],
        "token_types": [1] * 257 + [3] * 4, "token_merges": ["h i"], "eos_token_id": 257, "bos_token_id": 257,
        "pad_token_id": 260,
        "chat_template": "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|says|>",
    }.items():  # fmt: skip
        getattr(out, f"add_{name}")(value)
    for name, shape in SHAPES.items():
        numbers = draw.normal(size=shape).astype(np.float32)
        if len(shape) == 2:
            quantization = gguf.GGMLQuantizationType.Q4_1
            out.add_tensor(
                f"{name}.weight", gguf.quants.quantize(numbers, quantization), raw_dtype=quantization
            )
        else:
            out.add_tensor(f"{name}.weight", numbers)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_weights_are_the_numbers_that_the_formats_own_package_makes_of_the_file(file) -> None:
    """Rows of queries and keys stand in pairs in the file, and in halves in transformers."""
    state = LanguageModel(source=str(file)).make_model().state_dict()
    for tensor in gguf.GGUFReader(file).tensors:
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        leaf = tensor.name.removesuffix(".weight").removeprefix("blk.0.")
        top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
        name = top[leaf] if leaf in top else f"model.layers.0.{NAMES[leaf]}"
        if leaf in ("attn_q", "attn_k"):
            heads = HEADS if leaf == "attn_q" else KEYS
            wanted = wanted.reshape(heads, -1, 2, 32).swapaxes(1, 2).reshape(-1, 32)
        assert torch.equal(state.pop(f"{name}.weight"), torch.from_numpy(wanted.copy()))
    assert not state


def test_a_folder_of_it_has_the_same_names_logits_tokens_and_template(file, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    main([str(file), str(tmp_path / "out")])
    model, loaded = LanguageModel(source=str(file)).make_model(), AutoModelForCausalLM.from_pretrained(
        tmp_path / "out"
    )  # fmt: skip
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    ids = torch.tensor([[256, 5, 257, 17]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    assert set(open_checkpoint(tmp_path / "out")) == set(model.state_dict())
    ours, theirs = load_tokenizer(str(file)), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert ours("hi you<|end|>").input_ids == theirs("hi you<|end|>").input_ids
    chat = [[{"role": "user", "content": "hi"}]]
    shown = [t.apply_chat_template(*chat, tokenize=False, add_generation_prompt=True) for t in (ours, theirs)]
    assert shown == ["<|user|>hi<|end|><|says|>"] * 2
    with pytest.raises(InputError, match="already exists"):
        write_folder(str(file), tmp_path / "out")
    with pytest.raises(InputError, match="use it directly"):
        write_folder(str(tmp_path / "out"), tmp_path / "other")


def test_a_merge_of_checkpoints_is_told_how_to_read_such_a_file(file) -> None:
    with pytest.raises(InputError, match=r"GGUF.*`python -m mergekit_lab.backbones.folder"):
        open_checkpoint(file, "the base")
