"""Random Llama-shaped bf16 checkpoints, sharded, for measuring merges: a base and T experts.

    python experiments/merge_engine/make_llama.py OUT --layers 24 --hidden 1024 --mlp 4096 --vocabulary 32000

Experts are the base plus heavy-tailed noise of the size that fine-tuning leaves (mean magnitude 2e-3).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def list_shapes(layers: int, hidden: int, mlp: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama without grouped queries, input and output embeddings untied."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes |= {f"{at}mlp.{p}_proj.weight": (mlp, hidden) for p in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, mlp)
        shapes |= {f"{at}{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def write(folder: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Shards of about `shard_bytes`, and their index."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    for name, tensor in [*tensors, ("", torch.empty(0))]:
        if shard and (not name or sum(t.numel() * 2 for t in shard.values()) > shard_bytes):
            file = f"model-{len(set(weight_map.values())):05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
        shard[name] = tensor
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name, value in {"layers": 24, "hidden": 1024, "mlp": 4096, "vocabulary": 32000, "experts": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shard-mb", type=int, default=256)
    options = parser.parse_args()
    plan = list_shapes(options.layers, options.hidden, options.mlp, options.vocabulary)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": options.hidden, "intermediate_size": options.mlp, "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64, "num_key_value_heads": options.hidden // 64,
        "vocab_size": options.vocabulary, "tie_word_embeddings": False,
    }  # fmt: skip

    def generate_base() -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for name, shape in plan.items():
            yield name, (0.04 * torch.randn(shape, generator=generator)).bfloat16()

    def generate_expert(number: int) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(number + 1)
        for name, tensor in generate_base():
            noise = torch.randn(tensor.shape, generator=generator)
            yield name, (tensor.float() + 2e-3 * noise * noise.abs()).bfloat16()

    for name, tensors in [
        ("base", generate_base()),
        *((f"expert_{t}", generate_expert(t)) for t in range(options.experts)),
    ]:
        write(options.out / name, tensors, options.shard_mb << 20)
        (options.out / name / "config.json").write_text(json.dumps(config, indent=1))
    print(f"{sum(torch.Size(s).numel() for s in plan.values()) / 1e6:.0f} M parameters each in {options.out}")


if __name__ == "__main__":
    main()
