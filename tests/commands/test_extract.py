"""Merges and task vectors as LoRA adapters: what peft loads is the merge, or as near as the rank allows."""

import copy
import json

import pytest
import torch
from checkpoints.models import (
    clip,
    make_gpt2,
    make_llama,
    make_mixtral,
    make_t5,
    make_text_classifier,
    make_vit,
    open_clip_model,
    save,
    tune,
)
from composing import compose_config
from hub_server import holds
from safetensors.torch import load_file, save_file

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.merging import TIES, CoreSpace, TaskArithmetic, WeightAverage
from mergekit_lab.programs import start

MAKE = {"llama": (make_llama, ["q_proj", "down_proj"]), "gpt2": (make_gpt2, ["c_attn", "c_fc"])}


@pytest.fixture(scope="module", params=MAKE)
def world(request, tmp_path_factory):
    """A base, and two adapters of it of ranks 2 and 3, by folder."""
    from peft import LoraConfig, get_peft_model

    make, targets = MAKE[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save(make(), folder / "base")
    for seed, rank in ((1, 2), (2, 3)):
        torch.manual_seed(seed)
        own = targets if seed == 1 else targets[:1]
        conv = request.param == "gpt2"
        config = LoraConfig(
            r=rank, lora_alpha=5, target_modules=own, init_lora_weights=False, fan_in_fan_out=conv
        )
        get_peft_model(make(), config).save_pretrained(folder / f"lora{seed}")
    return folder, make


def load(folder, make) -> dict[str, torch.Tensor]:
    """What peft makes of the base and an adapter."""
    from peft import PeftModel

    return PeftModel.from_pretrained(make(), folder).merge_and_unload().state_dict()


def merge(world, out, method, **options):
    folder, _ = world
    loras = [folder / "lora1", folder / "lora2"]
    return mergekit_lab.merge(folder / "base", loras, out, method, device="cpu", **options)


@pytest.mark.filterwarnings("ignore")  # peft's of GPT-2's layers
@pytest.mark.parametrize(
    "method", [TaskArithmetic(coefficient=0.7, weights=[1.0, -0.5]), WeightAverage(), CoreSpace()]
)
def test_a_sum_of_adapters_or_a_merge_in_their_subspace_is_one_adapter_exactly(world, method, tmp_path) -> None:
    dense = open_checkpoint(merge(world, tmp_path / "dense", method))
    out = merge(world, tmp_path / "lora", method, format="adapter")
    for name, value in load(out, world[1]).items():
        if name in dense:
            torch.testing.assert_close(
                value, dense[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    config = json.loads((out / "adapter_config.json").read_text())
    assert {config["r"], *config["rank_pattern"].values()} == {2, 5}
    assert "rank 2 to 5" in (out / "README.md").read_text()


@pytest.mark.filterwarnings("ignore")
def test_other_merges_are_those_of_the_products_cut_to_the_rank(world, tmp_path) -> None:
    _, make = world
    base, method = make().state_dict(), TIES(preset="mergekit", density=0.5)
    dense = open_checkpoint(merge(world, tmp_path / "dense", method))
    out = merge(world, tmp_path / "lora", method, format="adapter", rank=4)
    extracted, wanted = load(out, make), dict(dense)
    names = [name for name in base if name in wanted and base[name].dim() == 2]
    lost = whole = 0.0
    for name in names:
        delta = wanted[name].double() - base[name].double()
        u, s, v = torch.linalg.svd(delta, full_matrices=False)
        best = (u[:, :4] * s[:4]) @ v[:4]
        torch.testing.assert_close(extracted[name].double() - base[name].double(), best, rtol=1e-4, atol=2e-6)
        lost, whole = lost + float(s[4:].square().sum()), whole + float(s.square().sum())
    assert f"relative error of what is added: {(lost / whole) ** 0.5:.3g}" in (out / "README.md").read_text()
    with pytest.raises(InputError, match="TIES is not a"):
        merge(world, tmp_path / "none", method, format="adapter")
    assert not (tmp_path / "none").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kept", [{"rank": 16}, {"energy": 0.6}, {"energy": 0.99, "rank": 3}], ids=str)
def test_extract_makes_an_adapter_of_a_task_vector(world, kept, tmp_path) -> None:
    folder, make = world
    expert = tune(make(), 4)
    state = expert.state_dict()
    out = mergekit_lab.extract(folder / "base", state, tmp_path / "lora", device="cpu", **kept)
    base, adapter = make().state_dict(), load(out, make)
    ranks = set()
    for name, value in state.items():
        delta, own = value - base[name], adapter[name] - base[name]
        linear = value.dim() == 2 and not any(part in name for part in ("embed", "wte", "wpe", "lm_head"))
        if not linear:
            continue
        energies = torch.linalg.svdvals(delta.double()).square()
        share = float(own.double().square().sum() / energies.sum())
        rank = int(torch.linalg.matrix_rank(own.double(), rtol=1e-4))
        ranks.add(rank)
        if kept == {"rank": 16}:
            torch.testing.assert_close(own, delta, rtol=1e-4, atol=2e-6)
        elif "rank" in kept:
            assert rank == 3
        else:
            assert share >= 0.6
            assert float(energies[: rank - 1].sum() / energies.sum()) < 0.6
    assert ranks
    assert "weights of linear layers" in (out / "README.md").read_text()
    again = open_checkpoint(out, base=open_checkpoint(base))
    assert all(torch.allclose(again[name], adapter[name], atol=1e-6) for name in again)


def test_weights_of_open_clip_beside_a_configuration_of_transformers_make_an_adapter(tmp_path) -> None:
    state = open_clip_model().state_dict()
    for name, shift in (("base", 0.0), ("expert", 0.1)):
        clip().config.save_pretrained(tmp_path / name)
        moved = {n: t + shift * torch.randn_like(t) if "mlp" in n else t for n, t in state.items()}
        save_file(moved, tmp_path / name / "open_clip_model.safetensors")
    out = mergekit_lab.extract(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=1, device="cpu")
    assert all(".mlp." in name for name in load_file(out / "adapter_model.safetensors"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [make_t5, make_vit, make_text_classifier, make_mixtral])
def test_peft_finds_every_weight_that_an_adapter_holds(make, tmp_path) -> None:
    save(make(), tmp_path / "base")
    base, expert = make().state_dict(), tune(make(), 4)
    save(expert, tmp_path / "expert")
    adapted = load(
        mergekit_lab.extract(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=32, device="cpu"),
        make,
    )
    linear = {
        f"{name}.weight" for name, module in expert.named_modules() if isinstance(module, torch.nn.Linear)
    }
    linear |= {name for name, value in base.items() if value.dim() == 3 and "experts" in name}
    for name, value in expert.state_dict().items():
        wanted = value if name in linear - set(expert.all_tied_weights_keys) else base[name]
        torch.testing.assert_close(
            adapted[name], wanted, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_more_than_linear_layers_need_a_rank_and_the_card_says_what_is_lost(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    save(make_llama(), tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
    adapted = get_peft_model(make_llama(), config)
    adapted.peft_config["default"].base_model_name_or_path = "/home/somebody/other"
    adapted.save_pretrained(tmp_path / "lora")
    how = (tmp_path / "base", [tmp_path / "lora"], tmp_path / "out", TaskArithmetic())
    with pytest.raises(InputError, match=r"LoRA.*\(DoRA"):
        mergekit_lab.merge(*how, device="cpu", format="adapter")
    out = mergekit_lab.merge(*how, device="cpu", format="adapter", rank=2)
    card = (out / "README.md").read_text()
    assert "adapter of rank 2" in card
    assert "trained on 'other'" in card
    assert not holds(out, "somebody")


def test_the_commands_write_adapters(tmp_path) -> None:
    save(make_llama(), tmp_path / "base")
    save(tune(make_llama(), 1), tmp_path / "expert")
    common = ["device=cpu", "progress=false", f"base={tmp_path}/base", "rank=2"]
    for name, more in (
        ("extract", [f"expert={tmp_path}/expert"]),
        ("merge_checkpoints", [f"experts=[{tmp_path}/expert]", "merger=ties", "format=adapter"]),
    ):
        cfg, choices = compose_config([f"+experiment={name}", *common, *more, f"out={tmp_path}/{name}"])
        start(cfg, tmp_path / "run", choices, [])
        assert json.loads((tmp_path / name / "adapter_config.json").read_text())["r"] == 2
        assert str(tmp_path) not in (tmp_path / name / "adapter_config.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "adapter"}, "rank=….*energy=…"),
        ({"format": "adapter", "rank": 0}, "rank is 0.*least 1"),
        ({"format": "adapter", "energy": 1.5}, r"energy is 1.5.*\(0, 1\]"),
        ({"rank": 3}, "rank.*format=adapter"),
        ({"format": "adapter", "rank": 2, "exclude": ["*proj*"]}, "an adapter of no changes"),
    ],
)
def test_what_no_adapter_holds_is_refused(options, message, tmp_path) -> None:
    base = make_llama()
    expert = copy.deepcopy(base)
    with torch.no_grad():
        expert.model.layers[0].mlp.up_proj.weight += 1
    with pytest.raises(InputError, match=message):
        mergekit_lab.merge(
            base.state_dict(),
            [expert.state_dict()],
            tmp_path / "out",
            TaskArithmetic(),
            device="cpu",
            **options,
        )
    assert not (tmp_path / "out").exists()
