"""Adapters as peft and transformers write them, on the folders that transformers writes: merged alone, they are
the model that was trained."""

import json
from typing import Any

import pytest
import torch
from checkpoints.models import (
    make_bart,
    make_bert,
    make_gemma3,
    make_granite_moe,
    make_llama,
    make_mixtral,
    make_qwen2_vl,
    make_t5,
    make_t5_1_1,
    make_two_berts,
    save_siglip,
)
from safetensors.torch import load_file, save_file

from mergekit_lab import InputError, merge, open_checkpoint
from mergekit_lab.merging import TSVM, TaskArithmetic

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft's call
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]


def adapt(model: Any, folder, **options: Any) -> Any:
    """The model with an adapter that was trained a little, which is saved."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6} | options))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return adapted.eval()


def merge_alone(base, adapter, out, **options: Any):
    """The folder that comes out where the adapter is all that is merged."""
    return merge(base, {"a": adapter}, out, TaskArithmetic(coefficient=1.0), device="cpu", **options)


TYING = {"ensure_weight_tying": True}
QV = {"target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_a_towers_adapter_is_folded_into_that_tower(tower: str, tmp_path) -> None:
    import transformers

    model_class = {"vision": transformers.SiglipVisionModel, "text": transformers.SiglipTextModel}[tower]
    base = save_siglip(tmp_path / "base")
    trained = adapt(model_class.from_pretrained(base), tmp_path / "a", **QV)
    got = model_class.from_pretrained(merge_alone(base, tmp_path / "a", tmp_path / "out"))
    shape = {"vision": torch.rand(1, 3, 16, 16), "text": torch.arange(8)[None]}[tower]
    torch.testing.assert_close(got(shape).pooler_output, trained(shape).pooler_output)
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "out"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 4
    assert all(name.startswith(f"{tower}_model.") for name in changed)


def without_a_class(folder) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_mapping": None}))


def test_names_that_fit_two_towers_are_refused_unless_something_tells_which(tmp_path) -> None:
    from transformers import SiglipVisionModel

    base = save_siglip(tmp_path / "base")
    adapt(SiglipVisionModel.from_pretrained(base), tmp_path / "a", **QV)
    state = load_file(base / "model.safetensors")
    in_memory = open_checkpoint(tmp_path / "a", base=open_checkpoint(state))  # by the class's prefix
    assert all(name.startswith("vision_model.") for name in in_memory.targets)
    without_a_class(tmp_path / "a")
    for source in (base, state):
        with pytest.raises(InputError, match=r"\(text_model\., vision_model\.\)"):
            open_checkpoint(tmp_path / "a", base=open_checkpoint(source))


def test_the_shapes_of_one_tower_tell_which_it_is(tmp_path) -> None:
    from transformers import SiglipTextModel, SiglipVisionModel

    base = save_siglip(tmp_path / "base", text=48)
    for model_class, tower in ((SiglipVisionModel, "vision_model."), (SiglipTextModel, "text_model.")):
        folder = tmp_path / tower
        adapt(model_class.from_pretrained(base), folder, target_modules=["fc1", "q_proj"])
        without_a_class(folder)
        folded = open_checkpoint(folder, base=open_checkpoint(load_file(base / "model.safetensors")))
        assert {name[: len(tower)] for name in folded.targets} == {tower}


def test_a_class_tells_the_tower_where_files_call_it_otherwise(tmp_path) -> None:
    """The class has `model.language_model.` in memory, and `language_model.model.` in files."""
    model = make_gemma3()
    model.save_pretrained(tmp_path / "base")
    adapt(model.model.language_model, tmp_path / "a", target_modules=["q_proj"])
    folded = open_checkpoint(tmp_path / "a", base=open_checkpoint(tmp_path / "base"))
    assert [name.rpartition("layers.")[0] for name in folded.targets] == ["language_model.model."]


def test_names_of_one_tower_alone_tell_which_it_is(tmp_path) -> None:
    from transformers import SiglipTextModel

    base = save_siglip(tmp_path / "base")
    adapt(SiglipTextModel.from_pretrained(base), tmp_path / "a", target_modules=["q_proj", "token_embedding"])
    without_a_class(tmp_path / "a")
    folded = open_checkpoint(tmp_path / "a", base=open_checkpoint(load_file(base / "model.safetensors")))
    assert {name.split(".")[0] for name in folded.targets} == {"text_model"}


def test_a_prefix_of_several_parts_is_found_unless_two_fit(tmp_path) -> None:
    names = ("layers.0.q", "layers.1.q")
    factors = {
        f"base_model.model.{n}.lora_{part}.weight": torch.ones(shape)
        for n in names
        for part, shape in (("A", (1, 4)), ("B", (4, 1)))
    }
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    weights = {f"model.encoder.{n}.weight": torch.zeros(4, 4) for n in names}
    folded = open_checkpoint(tmp_path, base=open_checkpoint(weights))
    assert set(folded.targets) == set(weights)
    weights |= {name.replace("encoder", "decoder"): value for name, value in weights.items()}
    with pytest.raises(InputError, match=r"\(model\.decoder\., model\.encoder\.\)"):
        open_checkpoint(tmp_path, base=open_checkpoint(weights))


def test_a_part_is_known_by_its_class_unless_two_are_of_that_class(tmp_path) -> None:
    whole = make_bart()
    whole.save_pretrained(tmp_path / "base")
    adapt(whole.model.encoder, tmp_path / "a", **QV)
    folded = open_checkpoint(tmp_path / "a", base=open_checkpoint(tmp_path / "base"))
    assert all(name.startswith("model.encoder.") for name in folded.targets)
    pair = make_two_berts()
    pair.save_pretrained(tmp_path / "pair")
    state = dict(pair.state_dict())
    adapt(pair.encoder, tmp_path / "b", target_modules=["query"])
    for source in (tmp_path / "pair", state):
        with pytest.raises(InputError, match=r"\(decoder\.bert\., encoder\.\)"):
            open_checkpoint(tmp_path / "b", base=open_checkpoint(source))


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, False),
        ({"target_modules": ["embed_tokens"]}, False),
        ({"target_modules": ["lm_head", "q_proj"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, False),
        ({"target_modules": ["embed_tokens", "lm_head"]} | TYING, True),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            True,
        ),
    ],
)
def test_an_adapter_of_one_of_two_tied_weights_unties_them(options, tied: bool, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    make_llama(tied=True).save_pretrained(tmp_path / "base")
    trained = adapt(make_llama(tied=True), tmp_path / "a", task_type="CAUSAL_LM", **options)
    out = merge_alone(tmp_path / "base", tmp_path / "a", tmp_path / "out")
    got = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(got(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-5)
    assert got.config.tie_word_embeddings is tied
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is not tied


def test_experts_that_stay_tied_are_merged_with_one_that_does_not(tmp_path) -> None:
    """In memory, on a base with both names in its files, and in a dry run alike."""
    from checkpoints.models import tune

    base = make_llama(tied=True)
    base.save_pretrained(tmp_path / "base")
    tune(make_llama(tied=True), 5).save_pretrained(tmp_path / "full")
    adapt(make_llama(tied=True), tmp_path / "a", target_modules=["embed_tokens"])
    both = tmp_path / "both"
    both.mkdir()
    (both / "config.json").write_text((tmp_path / "base" / "config.json").read_text())
    save_file({n: t.clone() for n, t in base.state_dict().items()}, both / "model.safetensors")
    experts = {"a": tmp_path / "a", "full": tmp_path / "full"}
    results = []
    for number, source in enumerate((tmp_path / "base", both)):
        out = merge(source, experts, tmp_path / f"out{number}", TaskArithmetic(coefficient=0.5), device="cpu")
        results.append(load_file(out / "model.safetensors"))
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    theta, full = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "full"))
    for merged in results:
        embedding = theta["model.embed_tokens.weight"]
        wanted = embedding + 0.5 * (full["model.embed_tokens.weight"] - embedding)
        torch.testing.assert_close(merged["lm_head.weight"], wanted)
        assert not torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def test_factors_on_the_base_as_it_is_cannot_untie_it(tmp_path) -> None:
    make_llama(tied=True).save_pretrained(tmp_path / "base")
    adapt(make_llama(tied=True), tmp_path / "a", target_modules=["embed_tokens"])
    with pytest.raises(InputError, match=r"lm_head\.weight"):
        merge(tmp_path / "base", [tmp_path / "a"], tmp_path / "out", TSVM(), device="cpu", format="low_rank")


@pytest.mark.parametrize("make", [make_t5, make_t5_1_1])
def test_a_tie_that_no_configuration_can_part_is_refused(make, tmp_path) -> None:
    make().save_pretrained(tmp_path / "base")
    adapt(make(), tmp_path / "a", target_modules=["q", "shared"])
    with pytest.raises(InputError, match=r"shared\.weight.*"):
        open_checkpoint(tmp_path / "a", "a", base=open_checkpoint(tmp_path / "base"))


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_gemma3, {"target_modules": r".*language_model.*q_proj"}),
        (make_gemma3, {"target_modules": ["q_proj", "fc1"], "task_type": "CAUSAL_LM"}),
        (make_qwen2_vl, {"target_modules": ["q_proj", "qkv", "down_proj"]}),
        (make_mixtral, {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "use_rslora": True}),
        (make_mixtral, {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
        (make_granite_moe, {"target_modules": [], "target_parameters": EXPERTS}),
        (make_mixtral, {"target_modules": ["w1", "w2", "w3", "gate"]}),
        (
            make_mixtral,
            {
                "target_modules": ["q_proj"],
                "target_parameters": EXPERTS,
                "rank_pattern": {r".*\.gate_up_proj": 2},
                "alpha_pattern": {"experts.down_proj": 3},
            },
        ),
    ],
)
def test_names_in_memory_are_found_in_the_folders_files(make, options, tmp_path) -> None:
    """Of a folder, of a state dict, and in both layouts of a mixture's experts."""
    make().save_pretrained(tmp_path / "base")
    trained = adapt(make(), tmp_path / "a", **options)
    got = type(make()).from_pretrained(merge_alone(tmp_path / "base", tmp_path / "a", tmp_path / "out"))
    wanted = trained.merge_and_unload().state_dict()
    assert any(not torch.equal(value, wanted[name]) for name, value in make().state_dict().items())
    folded = open_checkpoint(tmp_path / "a", base=open_checkpoint(make().state_dict()))
    for name, value in got.state_dict().items():
        torch.testing.assert_close(value, wanted[name], msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(folded[name], wanted[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_single_experts_fit_the_stacks_of_a_mixture(dtype: torch.dtype, tmp_path) -> None:
    """As earlier releases of transformers made them, on what release 5 saves: what they are on the pieces."""
    model = make_mixtral().to(dtype)
    model.save_pretrained(tmp_path / "pieces")
    model.save_pretrained(tmp_path / "stacks", save_original_format=False)
    generator, factors = torch.Generator().manual_seed(2), {}
    for name, value in load_file(tmp_path / "pieces" / "model.safetensors").items():
        if name.endswith(("experts.1.w1.weight", "experts.0.w2.weight", "q_proj.weight", "moe.gate.weight")):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{module}.lora_A.weight"] = torch.randn(2, value.shape[1], generator=generator)
            factors[f"{module}.lora_B.weight"] = torch.randn(value.shape[0], 2, generator=generator)
    (tmp_path / "a").mkdir()
    save_file(factors, tmp_path / "a" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    merged = {
        layout: type(model).from_pretrained(
            merge_alone(tmp_path / layout, tmp_path / "a", tmp_path / f"{layout}-out")
        )
        for layout in ("pieces", "stacks")
    }
    changed = 0
    for name, value in merged["pieces"].state_dict().items():
        assert torch.equal(merged["stacks"].state_dict()[name], value)
        changed += not torch.equal(value, model.state_dict()[name])
    assert changed == 4


def test_new_tokens_bring_their_rows_and_the_unused_copy_is_no_change(tmp_path) -> None:
    model = make_llama()
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(40, mean_resizing=False)
    trained = adapt(
        model, tmp_path / "a", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    from peft import get_peft_model_state_dict

    saved = get_peft_model_state_dict(trained, save_embedding_layers=True)
    save_file({n: t.clone() for n, t in saved.items()}, tmp_path / "a" / "adapter_model.safetensors")
    assert any("original_module" in name for name in saved)
    folded = open_checkpoint(tmp_path / "a", base=open_checkpoint(tmp_path / "base"))
    wanted = trained.merge_and_unload().state_dict()
    assert set(folded) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(folded[name], value)


def test_all_biases_beside_a_classifier(tmp_path) -> None:
    from transformers import AutoModelForSequenceClassification

    make_bert().save_pretrained(tmp_path / "pretrained")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "pretrained", num_labels=3)
    model.save_pretrained(tmp_path / "base")
    trained = adapt(model.eval(), tmp_path / "a", task_type="SEQ_CLS", target_modules=["query"], bias="all")
    got = AutoModelForSequenceClassification.from_pretrained(
        merge_alone(tmp_path / "base", tmp_path / "a", tmp_path / "out")
    )
    ids = torch.arange(9)[None]
    torch.testing.assert_close(got(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-5)


def test_ties_within_a_head_that_is_saved_whole_last_beside_one_that_is_parted(tmp_path) -> None:
    make_bert().save_pretrained(tmp_path / "base")
    trained = adapt(make_bert(), tmp_path / "a", target_modules=["query"], modules_to_save=["cls"])
    got = type(make_bert()).from_pretrained(merge_alone(tmp_path / "base", tmp_path / "a", tmp_path / "out"))
    ids = torch.arange(9)[None]
    torch.testing.assert_close(got(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-5)


def test_mica_is_plain_lora_once_it_is_trained(tmp_path) -> None:
    trained = adapt(make_llama(), tmp_path, target_modules=["q_proj", "up_proj"], init_lora_weights="mica")
    folded = open_checkpoint(tmp_path, base=open_checkpoint(make_llama().state_dict()))
    for name, value in trained.merge_and_unload().state_dict().items():
        torch.testing.assert_close(folded[name], value)


def test_an_adapter_is_found_by_its_file_and_in_a_folder_of_its_name(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(make_llama(), LoraConfig(**QV, init_lora_weights=False), adapter_name="math")
    adapted.save_pretrained(tmp_path / "run")
    assert not (tmp_path / "run" / "adapter_config.json").exists()
    base = open_checkpoint(make_llama().state_dict())
    wanted = open_checkpoint(tmp_path / "run" / "math", base=base)
    for source in (tmp_path / "run", tmp_path / "run" / "math" / "adapter_model.safetensors"):
        expert = open_checkpoint(source, base=base)
        assert all(torch.equal(expert[name], value) for name, value in wanted.items())
    adapted.add_adapter("code", LoraConfig(**QV))
    adapted.save_pretrained(tmp_path / "run")
    with pytest.raises(InputError, match=r"\(code, math\)"):
        open_checkpoint(tmp_path / "run", base=base)
