"""What is not merged need not be in the experts: the eyes of a text expert, heads, parts for training."""

import json

import pytest
import torch
from checkpoints.models import make_llama, make_qwen2_vl, save_siglip, tune
from safetensors.torch import load_file, save_file

from mergekit_lab import InputError, merge
from mergekit_lab.commands.dry_run import report
from mergekit_lab.commands.prepare import prepare
from mergekit_lab.merging import TSVM, Fisher, TaskArithmetic, WeightAverage, merge_state_dicts

# peft's call
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
METHOD = TaskArithmetic(coefficient=1.0)
SEES = {"visual.blocks.0.qkv.weight": torch.ones(8, 4), "visual.ids": torch.arange(3), "mtp.w": torch.ones(3)}
BASE = {"layers.0.w": torch.zeros(4, 4), "norm.w": torch.zeros(4), **SEES}
HEAD = {"v_head.w": torch.ones(2)}
TEXT = {"layers.0.w": torch.ones(4, 4), "norm.w": torch.ones(4)}


@pytest.mark.parametrize("method", [METHOD, WeightAverage(), TSVM()])
@pytest.mark.parametrize(
    "patterns", [{"include": ["layers.*", "norm.*"]}, {"exclude": ["visual.*", "mtp.*"]}, {"include": "norm.w"}]
)
def test_what_is_not_merged_is_the_bases_and_need_not_be_there(method, patterns) -> None:
    merged = merge_state_dicts(BASE, [TEXT], method, **patterns)
    assert merged.keys() == BASE.keys()
    for name, value in SEES.items():
        assert torch.equal(merged[name], value)
    assert torch.equal(merged["norm.w"], TEXT["norm.w"]) or isinstance(method, TSVM)


@pytest.mark.parametrize("patterns", [{"exclude": ["v_head.*"]}, {"include": ["layers.*", "norm.*"]}])
def test_what_only_experts_have_may_be_left_out(patterns) -> None:
    extra = {**TEXT, **HEAD}
    base = {name: BASE[name] for name in TEXT}
    with pytest.raises(InputError, match=r"has 1 tensors.*lacks"):
        merge_state_dicts(base, [extra], METHOD)
    merged = merge_state_dicts(base, [extra], METHOD, **patterns)
    assert all(torch.equal(merged[name], TEXT[name]) for name in TEXT)


@pytest.mark.parametrize(
    ("base", "expert", "patterns", "message"),
    [
        (BASE, TEXT, {"exclude": ["mtp.*"]}, r"lacks 2 tensors.*\(visual"),
        (BASE, TEXT, {"include": ["layers.*", "visual.*"]}, r"lacks 2 tensors.*\(visual"),
        (BASE, {**BASE, "visual.ids": torch.ones(3).long()}, {}, "than the base"),
        (
            TEXT,
            {**TEXT, "v_head.w": torch.ones(2), "q": torch.ones(2)},
            {"exclude": ["v_head.*"]},
            r"lacks \(q\)",
        ),
    ],
)
def test_what_is_merged_must_be_there(base, expert, patterns, message: str) -> None:
    with pytest.raises(InputError, match=message):
        merge_state_dicts(base, [expert], METHOD, **patterns)


def test_shapes_and_buffers_that_are_left_out_may_differ() -> None:
    other = {**BASE, "visual.blocks.0.qkv.weight": torch.ones(2, 2), "visual.ids": torch.ones(5).long()}
    merged = merge_state_dicts(BASE, [other], METHOD, exclude=["visual.*"])
    assert torch.equal(merged["visual.blocks.0.qkv.weight"], SEES["visual.blocks.0.qkv.weight"])


def test_side_inputs_are_needed_for_what_is_merged() -> None:
    fisher = {name: torch.ones(value.shape) for name, value in TEXT.items()}
    options = {"include": ["layers.*", "norm.*"], "statistics": {"fisher": [fisher]}}
    merge_state_dicts(BASE, [TEXT], Fisher(), **options)
    options["statistics"] = {"fisher": [{"norm.w": torch.ones(4)}]}
    with pytest.raises(InputError, match=r"lacks 1 tensors.*\(layers"):
        merge_state_dicts(BASE, [TEXT], Fisher(), **options)


def test_text_experts_of_a_model_that_sees_and_a_dry_run_that_says_so(tmp_path) -> None:
    make_qwen2_vl().save_pretrained(tmp_path / "base")
    base = load_file(tmp_path / "base" / "model.safetensors")
    text = {n: t + 0.5 for n, t in base.items() if not n.startswith("visual.")}
    save_file(text, tmp_path / "text.safetensors")
    inputs = (tmp_path / "base", {"a": tmp_path / "text.safetensors"}, METHOD)
    text_alone, all_but_eyes = {"include": ["model.*"]}, {"exclude": ["visual.*"]}
    for options, left in ((text_alone, {"visual", "lm_head"}), (all_but_eyes, {"visual"})):
        summary = report(prepare(*inputs, **options, read=False), tmp_path / "out", overwrite=True)
        assert summary.problems == []
        merge(*inputs[:2], tmp_path / "out", METHOD, device="cpu", overwrite=True, **options)
        merged = load_file(tmp_path / "out" / "model.safetensors")
        for name, value in base.items():
            wanted = value if name.split(".")[0] in left else text[name]
            torch.testing.assert_close(merged[name], wanted)
    summary = report(prepare(*inputs, read=False), tmp_path / "out")
    assert any("a lacks" in problem and "visual" in problem for problem in summary.problems)


def test_an_image_tower_into_a_whole_model(tmp_path) -> None:
    from transformers import SiglipVisionModel

    base = save_siglip(tmp_path / "base")
    tune(SiglipVisionModel.from_pretrained(base), 1).save_pretrained(tmp_path / "tower")
    out = merge(
        base, {"a": tmp_path / "tower"}, tmp_path / "out", METHOD, device="cpu", include=["vision_model.*"]
    )
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"vision_model"}


def test_an_adapters_head_that_the_base_lacks_may_be_left_out(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForSequenceClassification

    make_llama().save_pretrained(tmp_path / "base")
    model = LlamaForSequenceClassification(make_llama().config)
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "a")
    inputs = (tmp_path / "base", {"a": tmp_path / "a"}, tmp_path / "out", METHOD)
    with pytest.raises(InputError, match=r"has 1 tensors.*lacks \(score\.weight\)"):
        merge(*inputs, device="cpu")
    save_file(make_llama().state_dict(), tmp_path / "a" / "model.safetensors")
    file = tmp_path / "a/adapter_config.json"
    for wanted, known in (("/moved/Base/", True), ("org/other", False)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": wanted}))
        out = merge(*inputs, device="cpu", exclude=["score.*"], overwrite=True)
        record = (out / "mergekit_lab.json").read_text()
        assert "next to it (model.safetensors)" in record
        assert (
            "the adapter a was trained on 'org/other', and the base is called 'base'" in record
        ) is not known


BODY = {"layers.0.w": torch.ones(4, 4), "layers.1.w": torch.ones(4, 4)}
OTHER_NAMES = {
    "an encoder alone": ({"shared.weight": 0.0}, {"encoder.embed_tokens.weight": 1.0}, {}, 1.0),
    "the head's name alone": ({"embed_tokens.weight": 0.0}, {"lm_head.weight": 1.0}, {}, 1.0),
    "two values, one merged": (
        *({"embed_tokens.weight": 0.0}, {"embed_tokens.weight": 1.0, "lm_head.weight": 2.0}),
        *({"include": ["layers.*"]}, 0.0),
    ),
}


@pytest.mark.parametrize(("base", "expert", "patterns", "wanted"), OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_tied_embeddings_under_another_name(base, expert, patterns, wanted: float, tmp_path) -> None:
    for name, held in (("base", base), ("a", expert)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 6, "tie_word_embeddings": true}')
        tensors = {n: torch.full((6, 4), value) for n, value in held.items()}
        save_file(tensors | {n: w.clone() for n, w in BODY.items()}, tmp_path / name / "model.safetensors")
    prepared = prepare(tmp_path / "base", {"a": tmp_path / "a"}, METHOD, **patterns)
    merged = merge_state_dicts(prepared.base, prepared.experts, METHOD, **patterns)
    assert merged[next(iter(base))].unique().tolist() == [wanted]
    assert merged.keys() == {*base, *BODY}


def test_a_prefix_before_all_but_a_head() -> None:
    expert = {f"pretrained_model.{name}": value for name, value in BODY.items()} | HEAD
    prepared = prepare(BODY, {"a": expert}, METHOD, exclude=["v_head.*"])
    assert prepared.experts["a"].keys() == {*BODY, *HEAD}
    assert "but v_head.w is left out" in prepared.notes[0]


@pytest.mark.parametrize(
    "name", ["x.lora_A.weight", "unet.to_q.lora.down.weight", "lora_unet_to_q.lora_up.weight"]
)
def test_factors_without_their_configuration_are_named(name: str) -> None:
    with pytest.raises(InputError, match=r"'a'.*adapter_config.json"):
        prepare(BODY, {"a": {name: torch.ones(2, 2)}}, METHOD)
