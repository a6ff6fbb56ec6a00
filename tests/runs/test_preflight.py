"""Data of CLIP runs: decoded once, bounded, checked, fetched, refused when missing."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from composing import compose_config
from hub_repos import make_pictures, write_parquet, write_repository
from huggingface_hub import try_to_load_from_cache
from programs import start_program
from safetensors.torch import load_file, save_file

import mergekit_lab.backbones.open_clip as room
from mergekit_lab import InputError
from mergekit_lab.backbones import OpenClip, to_transformers
from mergekit_lab.backbones.clip_weights import ClipWeights
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.programs import start
from mergekit_lab.runs.curvature import declare_side_input
from mergekit_lab.runs.fetch import list_missing, refuse_missing
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.published_experts import find_expert
from mergekit_lab.runs.run import Run
from mergekit_lab.schema.check import build
from mergekit_lab.tasks import HubImages, decoding

ONE_TASK = [
    "suite=clip8",
    *(f"~suite.tasks.{t}" for t in ["cars", "dtd", "gtsrb", "mnist", "resisc45", "svhn", "sun397"]),
]
"""EuroSAT alone."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    task = build({**compose_config(["suite=clip8"])[0].suite.tasks.eurosat}, HubImages)
    write_repository(task, tmp_path / "data" / "eurosat")
    return tmp_path / "data"


def list_overrides(data: Path, store: Path, *more: str) -> list[str]:
    return [*ONE_TASK, f"data_root={data}", f"store.root={store}", *("progress=false", "device=cpu"), *more]


def make_run(data: Path, store: Path, *more: str) -> Run:
    cfg, choices = compose_config(list_overrides(data, store, *more))
    return Run(cfg, store, choices)


def test_images_are_decoded_once_and_mapped_from_the_store_afterwards(data, tmp_path, monkeypatch) -> None:
    first = make_run(data, tmp_path / "store").tasks["eurosat"]
    seen = {part: first.load_samples(part) for part in ("train", "validation", "test")}
    monkeypatch.setattr(decoding, "decode", lambda _: pytest.fail("decoded again"))
    monkeypatch.setattr("mergekit_lab.tasks.images.index_rows", lambda _: pytest.fail("hashed again"))
    again = make_run(data, tmp_path / "store").tasks["eurosat"]
    assert again.fingerprint() == first.fingerprint()
    for part, split in seen.items():
        assert torch.equal(again.load_samples(part).images[:], split.images[:])
        assert torch.equal(again.load_samples(part).labels, split.labels)


def test_other_files_are_read_anew_and_another_copy_of_them_is_not_decoded_again(data, tmp_path) -> None:
    old = make_run(data, tmp_path / "store").tasks["eurosat"]
    old.load_samples("test")
    folders = tmp_path / "store" / "images"
    copy = shutil.copytree(data, tmp_path / "copy")
    make_run(copy, tmp_path / "store").tasks["eurosat"].load_samples("test")
    assert len(list(folders.iterdir())) == 1
    write_parquet(copy / "eurosat" / "data" / "test-00000-of-00002.parquet", make_pictures(3, 10, 9))
    changed = make_run(copy, tmp_path / "store").tasks["eurosat"]
    assert changed.fingerprint() != old.fingerprint()
    changed.load_samples("test")
    assert len(list(folders.iterdir())) == 2


def test_the_size_is_said_before_it_is_made_and_bounded(data, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    make_run(data, tmp_path / "store").tasks["eurosat"].load_samples("test")
    assert "decoding into the store: 0.90 MB\n" in caplog.text
    small = make_run(data, tmp_path / "other", "images_limit_gb=0.0001").tasks["eurosat"]
    with pytest.raises(InputError, match=r"images_limit_gb is 0.0001"):
        small.load_samples("test")


def test_a_decoding_that_was_cut_leaves_nothing_that_is_taken_for_whole(data, tmp_path, monkeypatch) -> None:
    calls = []

    def decode_or_break(encoded: bytes):
        calls.append(encoded)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(encoded)

    real = decoding.decode
    monkeypatch.setattr(decoding, "decode", decode_or_break)
    with pytest.raises(KeyboardInterrupt):
        make_run(data, tmp_path / "store").tasks["eurosat"].load_samples("test")
    assert not list((tmp_path / "store").glob("images/*/manifest.json"))
    monkeypatch.setattr(decoding, "decode", real)
    whole = make_run(data, tmp_path / "store").tasks["eurosat"].load_samples("test")
    fresh = make_run(data, tmp_path / "fresh").tasks["eurosat"].load_samples("test")
    assert torch.equal(whole.images, fresh.images)


@pytest.fixture
def a_card(monkeypatch) -> None:
    """A card that nothing may run on: the run's device is the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("ran on the card"))


def test_heads_are_kept_by_backbone_task_and_prompts(data, a_card, tmp_path, monkeypatch) -> None:
    glyphs = ["backbone=glyph_clip", f"sources.eurosat={data}/eurosat"]
    first = make_run(data, tmp_path / "store", *glyphs).make_objective("eurosat").head
    monkeypatch.setattr(OpenClip, "make_zero_shot_head", lambda *_: pytest.fail("made again"))
    again = make_run(data, tmp_path / "store", *glyphs).make_objective("eurosat").head
    assert torch.equal(first, again)
    other = make_run(data, tmp_path / "store", *glyphs, "suite.tasks.eurosat.prompts=photo")
    with pytest.raises(pytest.fail.Exception, match="made again"):
        other.make_objective("eurosat")


@pytest.mark.parametrize("head", ["prototype", "linear_probe"])
def test_heads_from_images_classify_training_images_far_above_chance(head: str, a_card, tmp_path) -> None:
    cfg, choices = compose_config(
        ["suite=glyphs4", f"backbone.head={head}", f"store.root={tmp_path}", "device=cpu"]
        + [
            f"suite.tasks.digits.{part}_size={size}"
            for part, size in (("train", 200), ("validation", 50), ("test", 60))
        ]
    )
    objective = Run(cfg, tmp_path, choices).make_objective("digits")
    model = OpenClip("glyph-clip", "asset:glyph_clip").make_model()
    with torch.no_grad():
        predictions = objective.predict(model, "test", torch.arange(60))
    labels = objective.task.load_samples("test").labels
    assert (predictions == labels).float().mean() > 0.5
    assert Run(cfg, tmp_path, choices).describe_scoring("digits") == {"scoring": {"head": head}}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_published_state_dicts_take_the_place_of_training(prefix: str, data, tmp_path) -> None:
    """As task arithmetic's and its successors' files are, once they are plain state dicts."""
    state = OpenClip("glyph-clip", None, seed=5).make_model().state_dict()
    torch.save({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "eurosat.pt")
    more = ["backbone=glyph_clip", f"experts={tmp_path}", "joint=false", "stage=[finetune,evaluate]"]
    cfg, choices = compose_config(list_overrides(data, tmp_path / "store", *more))
    start(cfg, tmp_path / "run", choices, [])
    file = next((tmp_path / "store").glob("experts/*/model.safetensors"))
    stored = load_file(file)
    assert all(torch.equal(stored[name], tensor) for name, tensor in state.items())
    torch.save(torch.nn.Linear(2, 2), tmp_path / "eurosat.pt")
    with pytest.raises(InputError, match="the expert of eurosat"):
        start(cfg, tmp_path / "run", choices, [])
    cfg.joint = True
    with pytest.raises(InputError, match="set joint=false"):
        start(cfg, tmp_path / "run", choices, [])


@pytest.mark.parametrize("relative", ["ViT-B-32/EuroSATVal/nonlinear_finetuned.pt", "eurosat/finetuned.pt"])
def test_experts_are_found_where_task_arithmetic_and_its_successors_leave_them(
    relative, data, tmp_path
) -> None:
    file = tmp_path / "checkpoints" / relative
    file.parent.mkdir(parents=True)
    (file.parent / "zeroshot.pt").touch()
    file.touch()
    (file.parents[1] / "MNISTVal").mkdir()
    one = make_run(data, tmp_path, f"experts={tmp_path}/checkpoints", "backbone=clip_vit_b32")
    assert find_expert(one.plain["experts"], one.backbone, one.tasks["eurosat"]) == str(file)


def test_what_is_made_of_an_imported_expert_depends_on_data_head_and_finetuning(data, tmp_path) -> None:
    torch.save(OpenClip("glyph-clip", None, seed=5).make_model().state_dict(), tmp_path / "eurosat.pt")
    overrides_of_run = ["backbone=glyph_clip", f"experts={tmp_path}", "joint=false"]

    def make_fisher_key(*more: str) -> str:
        return declare_side_input(
            make_run(data, tmp_path / "store", *overrides_of_run, *more), "fisher", "eurosat"
        ).key

    fishers = [
        make_fisher_key(),
        make_fisher_key("backbone.head=prototype"),
        make_fisher_key("finetuning=linearized"),
    ]
    write_parquet(data / "eurosat" / "data" / "train-00000-of-00002.parquet", make_pictures(10, 10, 7))
    fishers.append(make_fisher_key())
    assert len(set(fishers)) == 4
    assert make_fisher_key() == fishers[-1]


def _make_cached(cache: Path, kind: str, repo: str) -> Path:
    """The folder of a repository's snapshot in the hub's cache, as its client lays it out."""
    repo_folder = cache / f"{kind}--{repo.replace('/', '--')}"
    (repo_folder / "refs").mkdir(parents=True)
    (repo_folder / "refs" / "main").write_text("0123abc")
    (repo_folder / "snapshots" / "0123abc").mkdir(parents=True)
    return repo_folder / "snapshots" / "0123abc"


def test_what_the_hubs_cache_holds_is_used_without_a_network(data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(room._HUB_NAMES, "glyph-clip", "clip-vit-base-patch32")
    more = [*ONE_TASK, "backbone=glyph_clip", "experts=hub:tanganke", "joint=false", "stage=[finetune]"]
    cfg, choices = compose_config([*more, f"store.root={tmp_path}/store", "device=cpu", "progress=false"])
    assert [line.split(",")[0] for line in list_missing(cfg)[0]] == [
        "eurosat: data set tanganke/eurosat of the hub",
        "expert tanganke/clip-vit-base-patch32_eurosat of the hub",
    ]
    snapshot = _make_cached(tmp_path / "hub", "datasets", "tanganke/eurosat")
    shutil.copytree(data / "eurosat", snapshot, dirs_exist_ok=True)
    (snapshot / "data" / "test-00001-of-00002.parquet").rename(tmp_path / "shard")
    assert len(list_missing(cfg)[0]) == 2  # a shard is missing
    (tmp_path / "shard").rename(snapshot / "data" / "test-00001-of-00002.parquet")
    expert = _make_cached(tmp_path / "hub", "models", "tanganke/clip-vit-base-patch32_eurosat")
    state = OpenClip("glyph-clip", None, seed=5).make_model().state_dict()
    vision = {n: t for n, t in to_transformers(state).items() if n.startswith("vision_model.")}
    save_file(vision, expert / "model.safetensors")
    assert list_missing(cfg) == ([], [])
    start(cfg, tmp_path / "run", choices, [])
    stored = load_file(next((tmp_path / "store").glob("experts/*/model.safetensors")))
    assert torch.equal(stored["visual.conv1.weight"], state["visual.conv1.weight"])
    assert not torch.equal(stored["visual.proj"], state["visual.proj"])  # the backbone's


def test_weights_are_known_to_be_cached_by_their_true_names(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    weights = ClipWeights("ViT-B-32-quickgelu", "openai")
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", partial(try_to_load_from_cache, cache_dir=tmp_path)
    )
    assert "timm/vit_base_patch32_clip_224.openai" in (weights.find_missing() or "")
    (
        _make_cached(tmp_path, "models", "timm/vit_base_patch32_clip_224.openai")
        / "open_clip_model.safetensors"
    ).touch()
    assert weights.find_missing() is None


def test_experts_that_are_not_there_are_named(data, tmp_path) -> None:
    one = make_run(
        data, tmp_path / "store", f"experts={tmp_path}", "backbone=clip_vit_b32", "backbone.weights=null"
    )
    with pytest.raises(InputError, match="no expert of 'eurosat'"):
        declare_expert(one, "eurosat")
    hub = make_run(
        data, tmp_path / "store", "experts=hub:tanganke", "backbone=clip_vit_l14", "backbone.weights=null"
    )
    assert (
        find_expert(hub.plain["experts"], hub.backbone, hub.tasks["eurosat"])
        == "tanganke/clip-vit-large-patch14_eurosat"
    )
    other = make_run(data, tmp_path / "store", "experts=hub:tanganke", "backbone=glyph_clip")
    with pytest.raises(InputError, match="no experts of glyph-clip"):
        find_expert(other.plain["experts"], other.backbone, other.tasks["eurosat"])


def test_training_on_windows_that_was_cut_gives_the_same_bits_as_one_that_was_not(
    data, tmp_path, monkeypatch
) -> None:
    from mergekit_lab.training import module as training

    def read_experts(store: Path) -> np.ndarray:
        cfg, choices = compose_config(
            list_overrides(
                data, store, "backbone=glyph_clip", "backbone.crop=[0.5,1.0]", "backbone.flip=true",
                "joint=false", "stage=[finetune]", "trainer.accelerator=cpu", "training.steps=4",
                "training.warmup_steps=1", "training.batch_size=4", "training.validations=2",
            )
        )  # fmt: skip
        start(cfg, store / "run", choices, [])
        return next(store.glob("experts/*/model.safetensors")).read_bytes()

    whole = read_experts(tmp_path / "whole")
    steps = training.FinetuneModule.training_step

    def cut(self, batch, batch_idx):
        if self.global_step == 3:
            raise RuntimeError("cut")
        return steps(self, batch, batch_idx)

    monkeypatch.setattr(training.FinetuneModule, "training_step", cut)
    with pytest.raises(RuntimeError, match="cut"):
        read_experts(tmp_path / "cut")
    assert list((tmp_path / "cut").glob("work/experts/*/resume/last.ckpt"))
    monkeypatch.setattr(training.FinetuneModule, "training_step", steps)
    assert read_experts(tmp_path / "cut") == whole


def test_a_test_image_that_cannot_be_decoded_is_named_before_training(data, tmp_path) -> None:
    rows = make_pictures(3, 10, 1)
    rows[2] = (rows[2][0][:60], 2)  # its header can be read
    write_parquet(data / "eurosat" / "data" / "test-00000-of-00002.parquet", rows)
    overrides_of_run = list_overrides(
        data, tmp_path / "store", "backbone=glyph_clip", "joint=false", "training.steps=2"
    )
    cfg, choices = compose_config([*overrides_of_run, "training.warmup_steps=0", "training.batch_size=4"])
    with pytest.raises(InputError, match=r"test-00000-of-00002.parquet, row 2 cannot"):
        start(cfg, tmp_path / "run", choices, [])
    assert not (tmp_path / "store" / "experts").exists()


def test_the_check_prints_sizes_and_ends_with_an_error_for_corrupt_images(data, tmp_path, capsys) -> None:
    cfg, choices = compose_config(list_overrides(data, tmp_path / "store", "stage=check_data"))
    start(cfg, tmp_path / "run", choices, [])
    printed = capsys.readouterr().out
    assert "(published: 2700) DIFFERS, 6" in printed
    checks = json.loads((tmp_path / "run" / "data_check.json").read_text())
    assert checks[0]["parts"]["train"]["images"] == 18
    rows = make_pictures(6, 10, 1)
    rows[1] = (b"no image", 1)
    write_parquet(data / "eurosat" / "data" / "test-00000-of-00002.parquet", rows)
    with pytest.raises(InputError, match=r"1 images.*data_check.json"):
        start(cfg, tmp_path / "run", choices, [])


def test_a_data_root_that_is_no_folder_is_refused_before_anything_is_downloaded(tmp_path) -> None:
    with pytest.raises(InputError, match=r"data_root is '.*/nope'"):
        start(
            compose_config(list_overrides(tmp_path / "nope", tmp_path / "store"))[0], tmp_path / "run", {}, []
        )


def without_a_network(experiment: str, tmp_path: Path) -> str:
    """What a command says that must fail."""
    lines = f"""
import runpy, sys
from huggingface_hub import constants
constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = True, {f"{tmp_path}/hub"!r}
sys.argv = ["mergekit_lab", "+experiment={experiment}", "run_dir={tmp_path}/run"]
runpy.run_module("mergekit_lab", run_name="__main__", alter_sys=True)
"""
    there = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = start_program(find_conf_dir().parent, code=lines, environment=there).wait()
    assert done.returncode == 1
    return done.stderr


def test_without_a_network_a_run_says_within_seconds_what_is_missing(tmp_path) -> None:
    message = without_a_network("vit_b32_saft", tmp_path)
    assert "9 missing" in message
    assert "HF_HUB_OFFLINE" in message
    assert "cars: data set tanganke/stanford_cars" in message
    assert "weights 'openai' of ViT-B-32-quickgelu" in message
    assert "stage=fetch fetch_to=FOLDER" in message
    assert "+experiment=quickstart" in message
    assert not (tmp_path / ".cache" / "mergekit_lab").exists()


def test_without_a_network_a_sweep_says_it_once_for_all_jobs_before_the_first(tmp_path) -> None:
    message = without_a_network("epimer_table6", tmp_path)
    assert message.count("35 missing") == 1  # data, and weights and experts of three
    assert message.count("+experiment=quickstart") == 1
    assert not (tmp_path / "run").exists()


def test_a_sweep_goes_on_while_one_job_lacks_nothing(data, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("mergekit_lab.runs.fetch.explain_unreachable", lambda: "no network")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    lacking = [compose_config([*ONE_TASK, f"backbone={name}"])[0] for name in ("clip_vit_b32", "clip_vit_b16")]
    here = compose_config([*ONE_TASK, f"data_root={data}", "backbone=glyph_clip"])[0]
    refuse_missing(here, *lacking)
    assert "refused: 3 missing" in caplog.text
    with pytest.raises(InputError, match="3 missing"):
        refuse_missing(*lacking)
