"""What a run finds before it merges: coefficients learned from inputs alone, weights searched on validation."""

import json
from pathlib import Path

import pytest
import torch
from composing import TINY, compose_config, go
from omegaconf import OmegaConf

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.backbones import OpenClip
from mergekit_lab.merging import DARE, AdaMerging, Learning, TaskArithmetic, merge_state_dicts
from mergekit_lab.programs import start
from mergekit_lab.reporting import read_records
from mergekit_lab.runs import search
from mergekit_lab.runs.mergers import build_mergers
from mergekit_lab.schema.run import Search
from mergekit_lab.store import Store

LEARNING = ["merger=adamerging", "merger.learn.steps=6", "merger.learn.lr=0.05", "joint=false"]


def learn(folder: Path, store: Path, *overrides: str) -> None:
    go(folder, store, *LEARNING, *overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("adaptive")
    learn(folder / "first", folder / "store")
    return folder / "first", folder / "store"


def read_artifact(store: Path, kind: str) -> tuple[Path, dict]:
    (manifest,) = (store / kind).glob("*/manifest.json")
    return manifest.parent, json.loads(manifest.read_text())


def test_the_entropy_falls_and_the_model_is_made_of_what_was_learned(finished) -> None:
    folder, store = finished
    model_folder, manifest = read_artifact(store, "coefficients")
    entropies = manifest["info"]["entropies"]
    assert len(entropies) == 6
    assert entropies[-1] < entropies[0]
    weights = json.loads((model_folder / "coefficients.json").read_text())
    assert all(0 <= value <= 1 for by_tensor in weights.values() for value in by_tensor.values())
    assert any(abs(value - 0.3) > 0.04 for by_tensor in weights.values() for value in by_tensor.values())
    records = read_records(folder / "records.jsonl")
    key = next(r.model_key for r in records if r.merger == "adamerging")
    assert {r.reads_test_inputs for r in records if r.merger} == {True}
    assert "test inputs" in (folder / "leaderboard.csv").read_text()
    experts = {
        r.task: store / "experts" / r.model_key / "model.safetensors" for r in records if r.kind == "expert"
    }
    base = OpenClip("glyph-clip", "asset:glyph_clip").make_model().state_dict()
    stored = open_checkpoint(store / "merged" / key)
    merged_again = merge_state_dicts(base, experts, AdaMerging(weights=weights))
    assert all(torch.equal(stored[name], value) for name, value in merged_again.items())
    unlearned = merge_state_dicts(base, experts, TaskArithmetic(coefficient=0.3))
    assert any(not torch.equal(stored[name], value) for name, value in unlearned.items())


def test_a_second_run_learns_nothing_and_other_settings_learn_anew(finished, tmp_path) -> None:
    _, store = finished

    def count() -> int:
        return len(list((store / "coefficients").glob("*/manifest.json")))

    learn(tmp_path, store)
    assert count() == 1
    learn(tmp_path, store, "stage=merge", "merger.learn.part=validation")
    assert count() == 2
    learn(tmp_path, store, "stage=merge", "merger.learn.layer_wise=false")
    assert count() == 3


def test_given_weights_are_merged_without_learning(finished, tmp_path) -> None:
    _, store = finished
    before = len(list((store / "coefficients").glob("*/manifest.json")))
    learn(tmp_path, store, "stage=merge", "merger.learn=null", "merger.weights=[0.2,0.6]")
    assert len(list((store / "coefficients").glob("*/manifest.json"))) == before


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("merger.learn.steps=0", "steps is 0"),
        ("merger.learn.batch_size=0", "batch_size is 0"),
        ("merger.learn.lr=-1", "lr is -1"),
        ("merger.learn.part=tset", "part is 'tset'.*test"),
        ("merger.weights=[0.2,0.6]", "set learn to null"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(override: str, match: str, tmp_path) -> None:
    with pytest.raises(InputError, match=match):
        learn(tmp_path / "run", tmp_path / "store", override)
    assert not (tmp_path / "store/experts").exists()


def test_a_merge_without_a_model_says_that_there_is_nothing_to_learn_from() -> None:
    with pytest.raises(InputError, match="learns its weights"):
        merge_state_dicts({"w": torch.ones(2)}, [{"w": torch.zeros(2)}], AdaMerging(learn=Learning(steps=3)))


def test_weights_are_searched_on_validation_and_the_model_is_made_of_the_best(
    finished, tmp_path, caplog, monkeypatch
) -> None:
    folder, store = finished
    tiny = [each for each in TINY if not each.startswith("search.")]
    how = ["search=evolve", "search.trials=5", "search.low=0.1", "search.layers=['*ln_*','*.mlp.*']"]
    cfg, choices = compose_config([*tiny, *how, f"store.root={store}", "joint=false", "merger=dare"])
    with caplog.at_level("INFO"):
        start(cfg, tmp_path, choices, how)
    info = read_artifact(store, "searches")[1]["info"]
    weights = info["fields"]["inner"]["weights"]
    words = {t: ", ".join(f"{p}: {w:.4g}" for p, w in each.items()) for t, each in weights.items()}
    weights_line = "inner.weights={" + ", ".join(f"{t}: {{{each}}}" for t, each in words.items()) + "}"
    assert caplog.text.count(weights_line) == 1
    assert f"validation chose {weights_line}." in (tmp_path / "summary.md").read_text()
    assert {tuple(by_pattern) for by_pattern in weights.values()} == {("*ln_*", "*.mlp.*", "*")}
    assert info["curve"][0]["fields"]["inner"]["weights"]["digits"] == dict.fromkeys(weights["digits"], 0.55)
    assert info["normalized"] == max(point["normalized"] for point in info["curve"])
    merged = {
        json.loads(p.read_text())["info"]["method"]: p.parent
        for p in (store / "merged").glob("*/manifest.json")
    }
    stored = open_checkpoint(next(folder for method, folder in merged.items() if "DARE" in method))
    records = read_records(folder / "records.jsonl")
    experts = {r.task: store / "experts" / r.model_key for r in records if r.kind == "expert"}
    base = OpenClip("glyph-clip", "asset:glyph_clip").make_model().state_dict()
    method = DARE(inner=TaskArithmetic(coefficient=1.0, weights=weights))
    merged_again = merge_state_dicts(base, experts, method)
    assert all(torch.equal(stored[name], value) for name, value in merged_again.items())

    scored = []
    monkeypatch.setattr(search, "_score_model", lambda run: scored.append(run) or (lambda task, share: 0.0))
    cfg.search.trials, cfg.stage = 7, "merge"
    start(cfg, tmp_path, choices, how)
    manifests = (store / "searches").glob("*/manifest.json")
    both = [json.loads(p.read_text())["info"] for p in manifests]
    shorter, longer = sorted(both, key=lambda info: len(info["curve"]))
    curve = longer["curve"]
    assert (curve[:5], len(curve), len(scored)) == (shorter["curve"], 7, 2), "more trials go on from others"
    assert longer["wall_seconds"] > shorter["wall_seconds"], "the others count at their cost"

    def refuse(store, kind):
        raise InputError(f"{kind} cannot be read")

    monkeypatch.setattr(Store, "list_artifacts", refuse)
    cfg.search.trials = 6
    start(cfg, tmp_path, choices, how)
    assert len(scored) == 2 + 6, "what cannot be read is not recalled"


@pytest.mark.parametrize(
    ("how", "of"),
    [
        (["search=evolve", "search.layers=['*.mlp.*','*.mpl.*']"], "search.layers"),
        (["merger.coefficient=1", "merger.weights={digits: {*.mpl.*: 1.0}, latin: 2}"], "weights"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_before_anything_is_trained(how, of: str, tmp_path) -> None:
    tiny = [each for each in TINY if not each.startswith("search.")]
    cfg, choices = compose_config([*tiny, *how, f"store.root={tmp_path}/store", "joint=false", "merger=ties"])
    with pytest.raises(InputError, match=rf"{of} is '\*\.mpl\.\*'"):
        start(cfg, tmp_path, choices, how)
    assert not (tmp_path / "store/experts").exists()


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("TSVM", {}, "mergers.x.*TSVM"),
        ("EpiMer", {}, "mergers.x.*EpiMer"),
        ("SCE", {}, "weights is"),
        ("TIES", {"weights": [0.2, 0.6]}, "mergers.x"),
    ],
)
def test_a_method_whose_weights_cannot_be_searched_is_refused_by_name(name, settings, match: str) -> None:
    node = OmegaConf.create({"_target_": f"mergekit_lab.merging.{name}", "coefficient": None, **settings})
    assert build_mergers({"x": node}, Search([1.0]), ("a", "b"))["x"].searched
    with pytest.raises(InputError, match=match):
        build_mergers({"x": node}, Search(method="cma_es"), ("a", "b"))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"method": "cma_es", "patience": 3}, "does not use search.patience"),
        ({"coefficients": [1.0], "trials": 3}, "does not use search.trials"),
        ({"method": "cma_es", "high": -1.0}, "search.low is 0.0.*search.high, -1.0"),
        ({"method": "halving"}, "search.method=halving needs search.coefficients"),
    ],
)
def test_keys_that_a_search_does_not_read_are_refused(settings, match: str) -> None:
    with pytest.raises(InputError, match=match):
        Search(**settings)
