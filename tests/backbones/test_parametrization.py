"""Parametrizations: what trains, what an expert computes, and that every expert is an ordinary checkpoint."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from mergekit_lab.backbones import (
    AttentionLinear,
    Classifier,
    Full,
    Linearized,
    LoRA,
    OpenClip,
    Tangent,
    linearize,
)
from mergekit_lab.backbones.attention import list_attention_weights
from mergekit_lab.curvature import diagonal_fisher
from mergekit_lab.errors import InputError
from mergekit_lab.merging import TIES, merge_state_dicts

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
KINDS = {
    "full": Full(),
    "linearized": Linearized(),
    "attention_linear": AttentionLinear(),
    "lora": LoRA(rank=3, alpha=5.0),
}


def make_tower() -> nn.Module:
    """A tower of open_clip's, 1 M parameters, with random weights."""
    return OpenClip("glyph-clip", None).make_model()


def make_llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, num_key_value_heads=1, tie_word_embeddings=True, **SMALL)
    return LlamaForCausalLM(config).eval()


def draw_pixels() -> torch.Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def draw_tokens() -> torch.Tensor:
    return torch.randint(32, (3, 5), generator=torch.Generator().manual_seed(1))


MODELS = {
    "open_clip": (make_tower, draw_pixels, lambda m, x: m(x)),
    "llama": (make_llama, draw_tokens, lambda m, x: m(x).logits),
}


def train(parametrization: str, make, run, x, steps: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = KINDS[parametrization].make_trainable(make(), seed=4)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        out = run(model, x)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        optimizer.step()
    model.eval()
    return model, KINDS[parametrization].fold(model)


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("parametrization", KINDS)
def test_an_expert_is_a_checkpoint_of_the_bases_names_that_computes_what_was_trained(
    parametrization, which
) -> None:
    make, draw, run = MODELS[which]
    x = draw()
    model, state = train(parametrization, make, run, x)
    base = make().state_dict()
    assert state.keys() == base.keys()
    assert all(state[n].shape == t.shape and state[n].dtype == t.dtype for n, t in base.items())
    assert any(not torch.equal(state[n], t) for n, t in base.items())
    again = KINDS[parametrization].make_evaluable(make()).eval()
    again.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(run(again, x), run(model, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("parametrization", KINDS)
def test_at_the_start_every_parametrization_computes_what_the_base_does(parametrization, which) -> None:
    make, draw, run = MODELS[which]
    with torch.no_grad():
        base, model = run(make(), draw()), run(KINDS[parametrization].make_trainable(make()).eval(), draw())
    torch.testing.assert_close(model, base, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["open_clip", "gpt2"])
def test_a_linearized_model_is_the_derivative_along_the_change_of_weights(which) -> None:
    """Against central differences in float64, which Llama's norms would leave. Features are not normalized."""
    gpt2 = (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), lambda: draw_tokens() % 16, MODELS["llama"][2])
    make, draw, run = {**MODELS, "gpt2": gpt2}[which]
    torch.manual_seed(0)
    model, x = make().double().eval(), draw()
    core = model.visual if which == "open_clip" else model
    x = x.double() if which == "open_clip" else x
    generator = torch.Generator().manual_seed(2)
    base = {n: p.detach().clone() for n, p in core.named_parameters()}
    change = {n: 0.02 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in base.items()}

    def compute_at(h: float) -> torch.Tensor:
        core.load_state_dict({n: base[n] + h * change[n] for n in base}, strict=False)
        with torch.no_grad():
            return run(core, x)

    slope = (8 * (compute_at(1e-3) - compute_at(-1e-3)) - (compute_at(2e-3) - compute_at(-2e-3))) / 12e-3
    value = compute_at(0.0)
    tangent = Tangent(core)
    tangent.load_state_dict({n: base[n] + change[n] for n in base}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(run(tangent, x), value + slope, rtol=1e-7, atol=1e-8)
        assert (compute_at(1.0) - value - slope).abs().max() > 1e-3


@pytest.mark.parametrize("which", MODELS)
def test_evaluation_in_inference_mode_computes_the_expansion_too(which) -> None:
    make, inputs, run = MODELS[which]
    x = inputs()
    model, _ = train("linearized", make, run, x)
    with torch.no_grad():
        expected = run(model, x)
    with torch.inference_mode():
        outputs = run(model, x)
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def test_mixed_precision_computes_the_same_expansion_roughly() -> None:
    tangent, x = Tangent(make_tower().visual), draw_pixels()
    outputs = []
    with torch.no_grad():
        [p.add_(0.01 * torch.randn_like(p)) for p in tangent.parameters()]
    for mixed in (False, True):
        tangent.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = tangent(x)
        (out.float() * torch.linspace(-1, 1, 64)).sum().backward()
        outputs.append(
            torch.cat([out.detach().float().flatten(), *(p.grad.flatten() for p in tangent.parameters())])
        )
    assert 1e-4 < (outputs[0] - outputs[1]).norm() / outputs[0].norm() < 0.05


def test_gradients_of_a_linearized_model_do_not_depend_on_where_its_weights_are() -> None:
    x = draw_pixels()
    gradients = []
    for shift in (0.0, 0.05):
        tangent = Tangent(make_tower().visual)
        with torch.no_grad():
            [p.add_(shift) for p in tangent.parameters()]
        (tangent(x) * torch.linspace(-1, 1, 64)).sum().backward()
        gradients.append([p.grad for p in tangent.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_merged_linearized_model_is_rebuilt_from_the_base_and_the_merged_state() -> None:
    """Merging commutes with the expansion: the sum of the experts' changes of output, not of their weights."""
    x, base = draw_pixels(), make_tower().state_dict()
    experts = {}
    for name, seed in {"a": 0, "b": 1}.items():
        generator = torch.Generator().manual_seed(seed)
        experts[name] = {n: t + 0.01 * torch.randn(t.shape, generator=generator) for n, t in base.items()}
    merged = {n: t + sum(e[n] - t for e in experts.values()) for n, t in base.items()}
    with torch.no_grad():
        cores = {n: linearize(make_tower(), e).visual(x) for n, e in (experts | {"m": merged}).items()}
        start = make_tower().visual(x)
        added = cores["a"] + cores["b"] - 2 * start
        torch.testing.assert_close(cores["m"] - start, added, rtol=1e-4, atol=1e-4)
        dense = make_tower()
        dense.load_state_dict(merged)
        assert (dense.visual(x) - cores["m"]).abs().max() > 0.01


def test_frozen_tensors_of_attention_only_experts_are_the_bases_bit_for_bit() -> None:
    base = make_tower().state_dict()
    _, state = train("attention_linear", *(MODELS["open_clip"][i] for i in (0, 2)), draw_pixels())
    moved = {n for n, t in base.items() if not torch.equal(state[n], t)}
    blocks = range(5)
    assert moved == {
        f"visual.transformer.resblocks.{i}.attn.{n}"
        for i in blocks
        for n in ("in_proj_weight", "out_proj.weight")
    }


def test_low_rank_experts_move_attention_by_products_of_the_rank() -> None:
    base = make_tower().state_dict()
    _, state = train("lora", *(MODELS["open_clip"][i] for i in (0, 2)), draw_pixels())
    ranks = {
        n: int(torch.linalg.matrix_rank((state[n] - t).double(), rtol=1e-4))
        for n, t in base.items()
        if t.ndim == 2
    }
    assert {n: r for n, r in ranks.items() if r} == dict.fromkeys(list_attention_weights(make_tower()), 3)
    assert all(torch.equal(state[n], t) for n, t in base.items() if t.ndim != 2)


def test_factors_are_drawn_from_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, same, other = (
        dict(LoRA(rank=2).make_trainable(make_tower(), seed=seed).named_parameters()) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    drawn = [n for n in first if "lora_A" in n]
    assert all(torch.equal(first[n], same[n]) for n in drawn)
    assert not any(torch.equal(first[n], other[n]) for n in drawn)


def test_experts_of_all_parametrizations_merge_with_each_other() -> None:
    states = {
        parametrization: train(parametrization, *(MODELS["llama"][i] for i in (0, 2)), draw_tokens())[1]
        for parametrization in KINDS
    }
    base = make_llama().state_dict()
    merged = merge_state_dicts(base, states, TIES(density=0.5))
    assert merged.keys() == base.keys()
    assert any(not torch.equal(merged[n], t) for n, t in base.items())


def test_the_fisher_of_a_linearized_expert_is_that_of_its_expansion() -> None:
    model, _ = train("linearized", *(MODELS["open_clip"][i] for i in (0, 2)), draw_pixels())
    classifier = Classifier(model, torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    x, labels = draw_pixels(), torch.tensor([0, 3, 1])
    fisher = diagonal_fisher(classifier, [(x, labels)], chunk=2)
    wanted = {n: torch.zeros_like(p) for n, p in classifier.named_parameters()}
    for i in range(3):
        classifier.zero_grad()
        cross_entropy(classifier(x[i : i + 1]), labels[i : i + 1]).backward()
        for n, p in classifier.named_parameters():
            wanted[n] += p.grad.square() / 3
    for n, value in wanted.items():
        torch.testing.assert_close(fisher[n], value, rtol=1e-3, atol=1e-6)


T5 = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
ATTENTION = {
    "llama": (make_llama, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), {"attn.c_attn", "attn.c_proj"}),
    "bert": (
        lambda: BertModel(BertConfig(vocab_size=16, **SMALL)),
        {"query", "key", "value", "attention.output.dense"},
    ),
    "t5": (
        lambda: T5ForConditionalGeneration(T5Config(**T5)),
        {f"{attention}.{p}" for attention in ("SelfAttention", "EncDecAttention") for p in "qkvo"},
    ),
}


@pytest.mark.parametrize("architecture", ATTENTION)
def test_attention_is_found_by_the_names_of_each_architecture_and_nothing_else(architecture) -> None:
    model, ends = ATTENTION[architecture]
    names = {n.removesuffix(".weight") for n in list_attention_weights(model())}
    assert names
    assert all(any(n.endswith(end) for end in ends) for n in names)
    assert all(any(n.endswith(end) for n in names) for end in ends)


def test_what_does_not_apply_is_refused_with_the_way_out() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(InputError, match=r"Sequential.*finetuning=full"):
        AttentionLinear().make_trainable(plain)
    with pytest.raises(InputError, match=r"Sequential.*finetuning\.targets"):
        LoRA().make_trainable(plain)
    with pytest.raises(InputError, match="and 1 keep"):
        Linearized().make_trainable(plain)
    with pytest.raises(InputError, match="finetuning=lora"):
        LoRA(targets=["nowhere"]).make_trainable(plain)
    with pytest.raises(InputError, match=r"attn\.out_proj"):
        LoRA(targets=["out_proj"]).make_trainable(make_tower())
    for wrong, match in [
        ({"rank": 0}, "rank is 0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"targets": []}, "is empty"),
    ]:
        with pytest.raises(InputError, match=match):
            LoRA(**wrong)


def test_a_linearized_language_model_takes_neither_labels_nor_a_cache() -> None:
    tangent = Linearized().make_trainable(make_llama())
    with pytest.raises(InputError, match="linearized too"):
        tangent(draw_tokens(), labels=draw_tokens())
    with pytest.raises(InputError, match="keeps no cache"):
        tangent(draw_tokens(), use_cache=True)
