"""Where a configuration makes weights of the same shapes compute something else, they are not merged unsaid."""

import json
from typing import Any

import pytest
import torch
from checkpoints.models import OPEN_CLIP, clip, make_bert, make_llama, make_two_berts, open_clip_model, tune
from safetensors.torch import save_file

from mergekit_lab import InputError, merge, open_checkpoint
from mergekit_lab.checkpoints import align
from mergekit_lab.checkpoints.model_config import compare_configs
from mergekit_lab.commands.dry_run import report
from mergekit_lab.commands.prepare import prepare
from mergekit_lab.merging import TaskArithmetic

METHOD = TaskArithmetic(coefficient=1.0)


def with_config(model: Any, folder, file: str = "config.json", **changes: Any) -> Any:
    """A folder of the model, with these keys of its configuration changed (None: taken out)."""
    model.save_pretrained(folder)
    config = json.loads((folder / file).read_text())
    for key, value in changes.items():
        *parents, last = key.split("__")
        part = config
        for parent in parents:
            part = part[parent]
        part[last] = value
        if value is None:
            del part[last]
    (folder / file).write_text(json.dumps(config))
    return folder


def compare(base, expert, allowed=()) -> Any:
    return compare_configs(open_checkpoint(base), {"a": open_checkpoint(expert)}, allowed)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}, "num_attention_heads"),
        ({"rope_parameters__rope_theta": 1e6}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
        ({"rope_parameters": None, "rope_theta": 5e5}, "rope_parameters.rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ({"model_type": "mistral"}, "model_type"),
        ({"output_multiplier": 2.0, "num_kv_shared_layers": 1}, "num_kv_shared_layers"),
    ],
)
def test_a_key_that_decides_what_weights_compute_is_refused(changes, key: str, tmp_path) -> None:
    make_llama().save_pretrained(tmp_path / "base")
    expert = with_config(tune(make_llama(), 1), tmp_path / "a", **changes)
    (problem,) = compare(tmp_path / "base", expert).problems
    assert f"{key} is" in problem
    assert f"{key} is" in compare(tmp_path / "base", expert, ["*"]).notes[0]
    inputs = (tmp_path / "base", {"a": expert})
    with pytest.raises(InputError, match=r"allow_config_mismatch=\["):
        merge(*inputs, tmp_path / "out", METHOD, device="cpu")
    assert any(key in p for p in report(prepare(*inputs, METHOD, read=False), tmp_path / "out").problems)
    keys = problem.rpartition("=[")[2].partition("]")[0].split(",")
    out = merge(*inputs, tmp_path / "out", METHOD, device="cpu", allow_config_mismatch=keys)
    assert key in str(json.loads((out / "mergekit_lab.json").read_text())["notes"])


def test_what_computes_the_same_is_no_difference(tmp_path) -> None:
    """Names, versions, dtypes, what only training sees; defaults, and names of keys of older releases."""
    make_llama().save_pretrained(tmp_path / "base")
    expert = with_config(
        make_llama(), tmp_path / "a", transformers_version="4.30.0", dtype=None, torch_dtype="bfloat16",
        _name_or_path="x", attention_dropout=0.1, initializer_range=0.5, use_cache=False, eos_token_id=5,
        rope_parameters=None, rope_theta=10000.0, rope_scaling=None, attention_bias=None, hidden_act=None,
    )  # fmt: skip
    assert compare(tmp_path / "base", expert) == ([], [])


@pytest.mark.parametrize(
    "key", ["use_bidirectional_attention", "pos_att_type", "clip_qkv", "attn_type", "dilation", "_class_name"]
)
def test_a_key_of_other_architectures_is_refused(key: str, tmp_path) -> None:
    for name, value in (("base", 1), ("a", 2)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({key: value}))
    assert f"{key} is 2 (1 in the base)" in compare(tmp_path / "base", tmp_path / "a").problems[0]


def test_timms_architecture_and_labels_are_compared(tmp_path) -> None:
    labels = ["no", "yes"]
    configs = {
        "base": {"architecture": "vit", "pretrained_cfg": {"label_names": labels}},
        "quick": {"architecture": "vit_quickgelu", "pretrained_cfg": {"label_names": labels}},
        "turned": {"architecture": "vit", "label_names": labels[::-1]},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        save_file({"head.weight": torch.ones(2)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    problems = [compare(tmp_path / "base", tmp_path / name).problems[0] for name in ("quick", "turned")]
    assert "architecture is vit_quickgelu" in problems[0]
    assert "label_names is ['yes', 'no']" in problems[1]


def test_other_keys_are_a_warning(tmp_path) -> None:
    make_llama().save_pretrained(tmp_path / "base")
    expert = with_config(make_llama(), tmp_path / "a", max_position_embeddings=64, something_new=3)
    (note,) = compare(tmp_path / "base", expert).notes
    assert "max_position_embeddings is 64 (32" in note
    assert "something_new is 3 (not" in note


def test_parts_are_compared_with_their_part_of_a_larger_model(tmp_path) -> None:
    clip().save_pretrained(tmp_path / "base")
    inner = with_config(clip(), tmp_path / "a", vision_config__hidden_act="gelu")
    assert "vision_config.hidden_act is gelu" in compare(tmp_path / "base", inner).problems[0]
    from transformers import CLIPVisionModel

    tower = CLIPVisionModel.from_pretrained(tmp_path / "base")
    tower.save_pretrained(tmp_path / "tower")
    assert compare(tmp_path / "base", tmp_path / "tower").problems == []
    other = with_config(tower, tmp_path / "other", num_attention_heads=4)
    assert "vision_config.num_attention_heads is 4" in compare(tmp_path / "base", other).problems[0]
    pair = make_two_berts()
    pair.save_pretrained(tmp_path / "pair")
    for part, keys in (("encoder", {}), ("decoder", {"hidden_act": "relu"})):
        expert = with_config(getattr(pair, part), tmp_path / part, **keys)
        base = open_checkpoint(tmp_path / "pair")
        comparison = compare_configs(base, {"a": align(base, open_checkpoint(expert))})
        problems = [problem.split("configuration: ")[1] for problem in comparison.problems]
        assert [text.partition(" (")[0] for text in problems] == [f"{part}.{key} is relu" for key in keys]


def test_a_configuration_that_transformers_does_not_know_is_compared_as_it_stands(tmp_path) -> None:
    for name, theta in (("base", {"rope_theta": 1e4}), ("same", {"rope_parameters": {"rope_theta": 1e4}}),
                        ("other", {"rope_theta": 1e6})):  # fmt: skip
        (tmp_path / name).mkdir()
        save_file(make_llama().state_dict(), tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "nobodys", "heads": 4, **theta}))
    assert compare(tmp_path / "base", tmp_path / "same").problems == []
    assert "rope_theta is 1000000.0" in compare(tmp_path / "base", tmp_path / "other").problems[0]


def test_open_clips_quick_gelu_is_refused(tmp_path) -> None:
    for name, more in (("base", {}), ("same", {"quick_gelu": False}), ("quick", {"quick_gelu": True})):
        folder = tmp_path / name
        folder.mkdir()
        save_file(open_clip_model().state_dict(), folder / "open_clip_model.safetensors")
        config = {"model_cfg": OPEN_CLIP | more}
        (folder / "open_clip_config.json").write_text(json.dumps(config))
    assert compare(tmp_path / "base", tmp_path / "same") == ([], [])
    save_file(open_clip_model().visual.state_dict(), tmp_path / "tower.safetensors")
    prepare(tmp_path / "base", {"a": tmp_path / "tower.safetensors"}, METHOD, include=["visual.*"])
    assert "quick_gelu is True (not" in compare(tmp_path / "base", tmp_path / "quick").problems[0]


@pytest.mark.parametrize(
    ("changes", "apart", "among"),
    [
        ({"vision_config__hidden_act": "gelu"}, "text_model.*", "vision_model.*"),
        ({"text_config__hidden_act": "gelu"}, "vis*", "text_model.*"),
        ({"text_config__layer_norm_eps": 1e-3}, "*.mlp.*", "text_model.*.layer_norm1.weight"),
        ({"vision_config__num_attention_heads": 1}, "vision_model.*.mlp.*", "vision_model.*.q_proj.weight"),
    ],
)
def test_keys_of_weights_that_are_not_merged_are_a_warning(changes, apart: str, among: str, tmp_path) -> None:
    clip().save_pretrained(tmp_path / "base")
    inputs = tmp_path / "base", {"a": with_config(tune(clip(), 1), tmp_path / "a", **changes)}, METHOD
    ((key, value),) = changes.items()
    kept = prepare(*inputs, include=[apart])
    assert f"{key.replace('__', '.')} is {value}" in kept.notes[0]
    with pytest.raises(InputError, match=rf"{key.replace('__', '.')} is {value}"):
        prepare(*inputs, include=[apart, among])


def test_a_heads_labels_in_another_order_are_refused_where_the_head_is_merged(tmp_path) -> None:
    from transformers import AutoModelForSequenceClassification

    make_bert().save_pretrained(tmp_path / "pretrained")
    folders = []
    for name, labels in (("base", None), ("a", ["no", "yes"]), ("b", ["yes", "no"])):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "pretrained", num_labels=2)
        if labels:
            model.config.id2label = dict(enumerate(labels))
        model.save_pretrained(tmp_path / name)
        folders.append(tmp_path / name)
    base, *experts = folders
    with pytest.raises(InputError, match=r"id2label is \['yes', 'no'\]"):
        merge(base, experts, tmp_path / "out", METHOD, device="cpu")
    merge(base, experts, tmp_path / "out", METHOD, device="cpu", exclude=["classifier.*"])
