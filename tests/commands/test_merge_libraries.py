"""Folders of open_clip, sentence-transformers and diffusers merge to what these libraries load."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints.models import (
    OPEN_CLIP,
    clip,
    make_bert,
    open_clip_model,
    save,
    tune,
)

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.merging import (
    TIES,
    TaskArithmetic,
    merge_state_dicts,
)

PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
METHOD = TIES(preset="mergekit", density=0.4, weights=[0.6, 0.9])
METHOD_OF_ONE = TaskArithmetic(coefficient=0.5)


@pytest.mark.parametrize("layout", ["pt", "state_dict", "folder"])
def test_what_open_clip_loads_back_computes_what_the_merged_state_dict_does(layout: str, tmp_path) -> None:
    import open_clip

    states = [open_clip_model().state_dict(), *(tune(open_clip_model(), seed).state_dict() for seed in (1, 2))]
    sources: list = list(states)
    if layout == "pt":
        sources = [tmp_path / f"{n}.pt" for n in range(3)]
        torch.save(states[0], sources[0])
        torch.save({"state_dict": {f"module.{n}": t for n, t in states[1].items()}, "epoch": 3}, sources[1])
        torch.save(states[2], sources[2])
    if layout == "folder":
        sources = [tmp_path / str(n) for n in range(3)]
        for folder, state in zip(sources, states, strict=True):
            folder.mkdir()
            write_tensors(folder / "open_clip_model.safetensors", state)
            (folder / "open_clip_config.json").write_text(
                json.dumps({"model_cfg": OPEN_CLIP, "preprocess_cfg": {}})
            )
    out = mergekit_lab.merge(
        sources[0], {"cars": sources[1], "svhn": sources[2]}, tmp_path / "out", METHOD, device="cpu",
        max_shard_bytes=1000 if layout == "folder" else 10**9,
    )  # fmt: skip
    if layout == "folder":
        loaded = open_clip.create_model(f"local-dir:{out}").eval()
    else:
        loaded = open_clip.CLIP(**OPEN_CLIP).eval()
        open_clip.load_checkpoint(loaded, str(out / "model.safetensors"))
    wanted = open_clip_model()
    wanted.load_state_dict(
        merge_state_dicts(states[0], dict(zip(("cars", "svhn"), states[1:], strict=True)), METHOD)
    )
    text = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        for ours, theirs in zip(loaded(PIXELS, text), wanted(PIXELS, text), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def save_for_both_libraries(folder: Path, seed: int) -> Path:
    """As some folders on the hub are: one model for transformers and one for open_clip."""
    tune(clip(), seed).save_pretrained(folder)
    write_tensors(folder / "open_clip_model.safetensors", tune(open_clip_model(), seed).state_dict())
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": OPEN_CLIP, "preprocess_cfg": {}}))
    return folder


def test_of_a_folder_for_two_libraries_comes_what_was_read_with_its_own_configuration(tmp_path) -> None:
    import open_clip
    from transformers import CLIPModel

    base, *experts = (
        save_for_both_libraries(tmp_path / name, seed) for seed, name in enumerate(("base", "a", "b"))
    )
    out = mergekit_lab.merge(base, experts, tmp_path / "hf", METHOD_OF_ONE, device="cpu")
    assert {"model.safetensors", "config.json"} <= {file.name for file in out.iterdir()}
    assert not list(out.glob("open_clip*"))
    assert CLIPModel.from_pretrained(out, output_loading_info=True)[1]["missing_keys"] == set()
    assert "model for transformers; open_clip_model.safetensors" in _read_card(out)
    file = base / "open_clip_model.safetensors"
    out = mergekit_lab.merge(file, experts, tmp_path / "oc", METHOD_OF_ONE, device="cpu")
    assert sorted(file.name for file in out.iterdir()) == [
        "README.md", "mergekit_lab.json", "open_clip_config.json", "open_clip_model.safetensors",
    ]  # fmt: skip
    loaded = open_clip.create_model(f"local-dir:{out}")
    wanted = merge_state_dicts(file, [e / "open_clip_model.safetensors" for e in experts], METHOD_OF_ONE)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in wanted.items())
    assert "model for open_clip; model.safetensors" in _read_card(out)
    assert "| base | base/open_clip_model.safetensors |" in _read_card(out)
    with pytest.raises(InputError, match=r"base=.*open_clip_model"):
        mergekit_lab.merge(base, [experts[0] / "open_clip_model.safetensors"], tmp_path / "no", METHOD_OF_ONE)


def _read_card(out: Path) -> str:
    return (out / "README.md").read_text()


def save_sentence_transformer(folder: Path, seed: int) -> Path:
    save(tune(make_bert(), seed), folder)
    for name in ("1_Pooling", "2_Dense", "cache"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"of": name}))
    write_tensors(folder / "2_Dense/model.safetensors", {"linear.weight": torch.full((2, 2), float(seed))})
    modules = [{"idx": n, "path": path} for n, path in enumerate(("", "1_Pooling", "2_Dense", "3_Normalize"))]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name in ("config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).write_text("{}")
    return folder


def test_the_modules_of_sentence_transformers_come_along(tmp_path) -> None:
    base, expert = (
        save_sentence_transformer(tmp_path / name, seed) for seed, name in ((3, "base"), (4, "expert"))
    )
    out = mergekit_lab.merge(base, [expert], tmp_path / "out", METHOD_OF_ONE, device="cpu")
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert {"config_sentence_transformers.json", "sentence_bert_config.json"} <= {f.name for f in out.iterdir()}
    assert not (out / "cache").exists()
    assert "2_Dense: weights of sentence-transformers" in _read_card(out)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([{"path": "../expert"}], r"outside its own \(\.\./expert\)"),
        ([{"path": "/etc"}], "outside its own"),
        ([{"path": ".."}], "outside its own"),
        ({"path": "1_Pooling"}, "does not list modules"),
        ([{}], "does not list modules"),
    ],
)
def test_a_list_of_modules_that_leads_elsewhere_is_refused_before_anything(modules, message, tmp_path) -> None:
    base, expert = (save_sentence_transformer(tmp_path / name, 0) for name in ("base", "expert"))
    (base / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match=message):
        mergekit_lab.merge(base, [expert], tmp_path / "out", METHOD_OF_ONE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shard_bytes", [1 << 20, 40], ids=["one file", "shards"])
def test_a_folder_of_diffusers_is_written_under_the_name_that_it_looks_for(tmp_path, shard_bytes: int) -> None:
    states = {
        name: {"a": torch.full((8,), value), "b": torch.ones(8)} for name, value in (("base", 0.0), ("x", 2.0))
    }
    for name, state in states.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"_class_name": "UNet2DModel", "sample_size": 8})
        )
        write_tensors(tmp_path / name / "diffusion_pytorch_model.safetensors", state)
    out = tmp_path / "out"
    mergekit_lab.merge(tmp_path / "base", [tmp_path / "x"], out, METHOD_OF_ONE, max_shard_bytes=shard_bytes)
    weights = {file.name for file in out.iterdir() if "safetensors" in file.name}
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert (index in weights) if shard_bytes == 40 else weights == {"diffusion_pytorch_model.safetensors"}
    assert all(name.startswith("diffusion_pytorch_model") for name in weights)
    assert torch.equal(open_checkpoint(out)["a"], torch.full((8,), 1.0))
