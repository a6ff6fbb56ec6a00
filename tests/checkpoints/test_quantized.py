"""Weights in few bits are known by what lies beside them, whatever a library calls it; others are let pass."""

import pytest
import torch
from safetensors.torch import save_file

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import refuse_quantized, write_tensors

F8, F32, BF16, U8, I8 = torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.uint8, torch.int8
I16, I32, I64, U32 = torch.int16, torch.int32, torch.int64, torch.uint32

QUANTIZED = {
    "deepseek": {"q.weight": (F8, 256, 256), "q.weight_scale_inv": (F32, 2, 2)},
    "fbgemm": {"q.weight": (F8, 32, 16), "q.weight_scale": (BF16, 32, 1), "q.bias": (BF16, 32)},
    "comfyui": {"q.weight": (F8, 32, 16), "q.scale_weight": (F32,)},
    "quanto float8": {"q.weight._data": (F8, 32, 16), "q.weight._scale": (F32, 32, 1)},
    "quanto int4": {"q.weight._data._data": (U8, 16, 16), "q.weight._scale": (F32, 64, 1)},
    "torchao": {"q.weight.qdata": (F8, 32, 16), "q.weight.scale": (F32, 32, 1)},
    "torchao flat": {"q._weight_qdata": (I8, 32, 16), "q._weight_scale": (F32, 32)},
    "stacked experts": {
        **{"experts.gate_up_proj": (F8, 2, 32, 16), "experts.gate_up_proj_scale": (F32, 2, 32, 1)},
        **{"experts.down_proj": (F8, 2, 16, 16), "experts.down_proj_scale": (F32, 2, 16, 1)},
    },
    "of the file": {"w": (F8, 32, 16), "w_scale": (F32, 32)},
    "mxfp8": {"q.weight": (F8, 32, 64), "q.weight_scale": (U8, 32, 2)},
    "mxfp4": {
        **{"experts.gate_up_proj_blocks": (U8, 2, 32, 2, 16), "experts.gate_up_proj_scales": (U8, 2, 32, 2)},
        **{"experts.gate_up_proj_bias": (BF16, 2, 32)},
    },
    "nvfp4": {"q.weight": (U8, 32, 16), "q.weight_scale": (F8, 32, 2), "q.weight_scale_2": (F32,)},
    "nvfp4 packed": {"q.weight_packed": (U8, 32, 16), "q.weight_scale": (F8, 32, 2)},
    "hqq": {"q.W_q": (U8, 64, 16), "q.scale": (BF16, 1, 32), "q.zero": (BF16, 1, 32)},
    "gptq": {
        **{"q.qweight": (I32, 8, 32), "q.qzeros": (I32, 1, 4), "q.scales": (BF16, 1, 32)},
        **{"q.g_idx": (I32, 64)},
    },
    "exl2": {"q.q_weight": (I32, 8, 32), "q.q_scale": (I32, 1, 4), "q.q_scale_max": (BF16, 1)},
    "aqlm": {"q.codes": (I16, 32, 4, 1), "q.codebooks": (BF16, 1, 64, 1, 1), "q.scales": (BF16, 32, 1, 1, 1)},
    "bitsandbytes int8": {"q.weight": (I8, 32, 16), "q.SCB": (F32, 32)},
    "bitsandbytes nf4": {"q.weight": (U8, 256, 1), "q.weight.absmax": (F32, 8)},
    "mlx": {"q.weight": (U32, 32, 4), "q.scales": (BF16, 32, 1), "q.biases": (BF16, 32, 1)},
    "bitnet": {"q.weight": (U8, 8, 16), "q.weight_scale": (BF16, 1)},
    "beside its module": {"attn.q.weight": (F8, 32, 16), "attn.q_scale": (F32,)},
    "in a folder of scales": {"attn.q.weight": (F8, 32, 16), "scales.attn.q": (F32, 32)},
    "in another folder of scales": {"model.a.q.weight": (F8, 32, 16), "scales.a.q": (F32,)},
    "for the whole file": {"attn.q.weight": (F8, 32, 16), "attn.k.weight": (F8, 32, 16), "scale": (F32,)},
    "one each for the file": {"a.q.weight": (F8, 32, 16), "b.q.weight": (F8, 32, 16), "scales": (F32, 2)},
    "for a whole module": {"attn.q.weight": (F8, 32, 16), "attn.weight_scale": (F32, 1)},
    "for a whole module, integers": {"attn.q.kernel": (I8, 32, 16), "attn.scale": (F32,)},
    "in bytes without blocks": {"q.weight": (F8, 32, 64), "q.scales": (U8, 64)},
    "without its scales": {"q.qweight": (I32, 8, 32)},
    "called like a bias": {"q.weight": (F8, 32, 16), "q.scale_b": (F32,)},
    "scaled in float8": {"q.weight": (F8, 32, 16), "q.weight_scale": (F8, 32, 1)},
    "packed in 64 bits": {"q.qweight": (I64, 8, 16), "q.scales": (F32, 32, 1)},
    "64 bits alone": {"q.weight": (I64, 8, 16)},
    "one bit": {"q.weight": (torch.bool, 32, 16), "q.alpha": (F32, 32)},
    "marked by ComfyUI": {"q.weight": (F8, 32, 16), "q.comfy_quant": (U8, 40)},
    "marked as a whole": {"unet.a.q.weight": (F8, 32, 16), "unet.scaled_fp8": (F8, 2)},
    "marked by Transformer Engine": {"q.weight": (F8, 32, 16), "q._extra_state": (U8, 300)},
    "marked by ModelOpt": {"q.weight": (F8, 32, 16), "q.weight_quantizer._amax": (F32,)},
    "SpQR": {"q.dense_weights": (I64, 64), "q.row_offsets": (I32, 9), "q.in_perm": (I64, 8)},
    "packed on one axis": {"q.weight": (I32, 64)},
    "called like a bias of the weight": {"q.weight": (F8, 32, 16), "q.weight_b": (F32,)},
    "an unknown one": {"q.nibbles": (U8, 32, 16), "q.stretch": (BF16, 32)},
}
PLAIN = {
    "float8 cast": {"q.weight": (F8, 32, 16), "q.bias": (BF16, 32)},
    "float8 weights of the file": {"text_projection": (F8, 32, 16), "logit_scale": (F32,), "class": (F32, 16)},
    "float8 attention": {"attn.in_proj_weight": (F8, 48, 16), "attn.in_proj_bias": (F32, 48)},
    "float8 experts": {"experts.gate_up_proj": (F8, 2, 32, 16), "experts.gate_up_proj_bias": (F32, 2, 32)},
    "float8 router": {"gate.weight": (F8, 8, 16), "gate.e_score_correction_bias": (F32, 8)},
    "float8 all over": {"norm.weight": (F8, 16), "norm.scale": (F8, 16), "q.weight": (F8, 32, 16)},
    "Flux's norms": {"a.qkv.weight": (F8, 96, 32), "a.norm.key_norm.scale": (BF16, 32), "a.p.bias": (F8, 96)},
    "an 8-bit copy elsewhere": {
        "a.q.weight": (F8, 32, 16),
        "b.q.weight": (BF16, 8, 8),
        "b.q._extra_state": (U8, 3),
    },
    "tables of 64 bits": {"gate.tid2eid": (I64, 32, 6), "gate.weight": (BF16, 8, 16), "gate.scale": (F32,)},
    "Whisper's heads": {"alignment_heads": (I64, 6, 2), "scale": (F32,), "mask": (torch.bool, 4, 4)},
    "GPT-2's masks": {"attn.bias": (U8, 1, 1, 16, 16), "attn.masked_bias": (F32,)},
    "CLIP's positions": {"embeddings.position_ids": (I64, 1, 50), "embeddings.class_embedding": (F32, 16)},
    "positions of 32 bits": {"embeddings.position_ids": (I32, 1, 50), "embeddings.class_embedding": (F32, 16)},
    "Swin": {"attn.relative_position_index": (I32, 16, 16), "attn.relative_position_bias_table": (F32, 49, 2)},
    "batch norm": {"bn.weight": (F32, 8), "bn.running_mean": (F32, 8), "bn.num_batches_tracked": (I64,)},
    "attention's own scale": {"attn.q.weight": (F8, 32, 16), "attn.scale": (BF16, 4)},
    "tables of scales": {"blk.0.q.weight": (F8, 32, 16), "blk.0.scale_shift_table": (BF16, 6, 16)},
    "a model's one scale": {"q.weight": (BF16, 16, 16), "ids": (I32, 16), "scale": (F32,)},
    "scales of a cache": {"k_proj.weight": (BF16, 16, 16), "k_proj.k_scale": (F32,)},
}


def open_with(layout, folder):
    write_tensors(folder / "model.safetensors", {n: torch.zeros(s).to(d) for n, (d, *s) in layout.items()})
    return open_checkpoint(folder, "cars")


@pytest.mark.parametrize("layout", QUANTIZED.values(), ids=QUANTIZED)
def test_numbers_that_need_a_scale_are_refused_by_name(layout, tmp_path) -> None:
    weight = next(iter(layout))
    with pytest.raises(InputError, match=rf"cars is quantized \(\d tensors: .*{weight}"):
        refuse_quantized(open_with(layout, tmp_path))


def test_what_a_header_says_is_believed(tmp_path) -> None:
    metadata = {"_quantization_metadata": '{"layers": {"q": {"format": "float8_e4m3fn"}}}'}
    save_file({"q.weight": torch.zeros(4, 4).to(F8)}, tmp_path / "model.safetensors", metadata)
    with pytest.raises(InputError, match="cars is quantized"):
        open_checkpoint(tmp_path, "cars")


@pytest.mark.parametrize("layout", PLAIN.values(), ids=PLAIN)
def test_numbers_that_stand_for_themselves_are_not(layout, tmp_path) -> None:
    refuse_quantized(open_with(layout, tmp_path))
