"""Stage curvature: what is computed, for whom, and that it is found again."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from composing import TINY, compose_config, go

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.backbones import OpenClip
from mergekit_lab.checkpoints import LowRank
from mergekit_lab.merging import LocalizeStitch, RegMean, merge_state_dicts
from mergekit_lab.reporting import read_records
from mergekit_lab.schema.run import check


def list_keys(store: Path, kind: str) -> set[str]:
    return {p.parent.name for p in (store / kind).glob("*/manifest.json")}


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("regmean")
    go(folder / "first", folder / "store", "merger=regmean", "joint=false")
    return folder / "first", folder / "store"


def test_regmean_runs_end_to_end_on_grams_that_the_run_computes(merged) -> None:
    folder, store = merged
    records = read_records(folder / "records.jsonl")
    key = {r.model_key for r in records if r.merger == "regmean"}
    assert len(key) == 1
    assert len(list_keys(store, "grams")) == 2
    assert not list_keys(store, "fishers")
    base = OpenClip("glyph-clip", "asset:glyph_clip").make_model().state_dict()
    expert_keys = [r.model_key for r in records if r.kind == "expert"]
    order = {
        e: g
        for g in list_keys(store, "grams")
        for e in expert_keys
        if e in (store / "grams" / g / "manifest.json").read_text()
    }
    wanted = merge_state_dicts(
        base,
        {e: store / "experts" / e / "model.safetensors" for e in expert_keys},
        RegMean(ratio=0.9),
        statistics={"gram": {e: store / "grams" / order[e] / "gram.safetensors" for e in expert_keys}},
    )
    stored = open_checkpoint(store / "merged" / key.pop())
    for name in ("visual.transformer.resblocks.0.attn.in_proj_weight", "visual.proj"):
        torch.testing.assert_close(stored[name], wanted[name])


def test_regmean_plusplus_takes_its_grams_in_the_merged_model(merged, tmp_path) -> None:
    """The experts are found; the merge is the one by Grams chained over the same samples."""
    _, store = merged
    grams = list_keys(store, "grams")
    before = list_keys(store, "merged")
    go(tmp_path, store, "merger=regmean_plusplus", "joint=false", "stage=merge")
    (key,) = list_keys(store, "merged") - before
    assert list_keys(store, "grams") == grams
    records = read_records(merged[0] / "records.jsonl")
    experts = {
        r.task: store / "experts" / r.model_key / "model.safetensors" for r in records if r.kind == "expert"
    }
    stored, (plain,) = open_checkpoint(store / "merged" / key), before
    first, last = (f"visual.transformer.resblocks.{n}.mlp.c_fc.weight" for n in (0, 1))
    other = open_checkpoint(store / "merged" / plain)
    mean = sum(open_checkpoint(path)["visual.conv1.weight"] for path in experts.values()) / len(experts)
    torch.testing.assert_close(stored["visual.conv1.weight"], mean)
    assert not torch.equal(stored[last], other[last])
    assert float((stored[first] - other[first]).norm() / other[first].norm()) < 0.2


def test_grams_are_found_again_by_any_run_that_asks_for_the_same(merged, tmp_path, monkeypatch) -> None:
    _, store = merged
    before = list_keys(store, "grams")
    monkeypatch.setattr("mergekit_lab.runs.curvature.input_grams", None)
    go(tmp_path / "a", store, "merger=regmean", "stage=[curvature,merge]")
    go(tmp_path / "b", store, "stage=curvature", "curvature=gram", "merger=average", "curvature.chunk=3")
    go(tmp_path / "c", store, "stage=curvature", "curvature=gram", "merger=average", "curvature.sampled=true")
    assert list_keys(store, "grams") == before


def test_fractions_and_samples_name_other_artifacts(merged, tmp_path) -> None:
    _, store = merged
    go(tmp_path / "a", store, "stage=curvature", "curvature=gram", "merger=average", "curvature.samples=4")
    assert len(list_keys(store, "grams")) == 4
    go(tmp_path / "b", store, "stage=curvature", "curvature=fisher", "merger=average", "curvature.samples=null",
       "curvature.fraction=0.1")  # fmt: skip
    (digits,) = [m for m in (store / "fishers").glob("*/manifest.json") if '"samples": 6' in m.read_text()]
    fisher = open_checkpoint(digits.parent / "fisher.safetensors")
    expert = open_checkpoint(next((store / "experts").glob("*/model.safetensors")))
    assert {n: s.shape for n, s in fisher.specs.items()} == {n: s.shape for n, s in expert.specs.items()}


@pytest.mark.parametrize(("side_input", "function"), [("fisher", "diagonal_fisher"), ("gram", "input_grams")])
def test_out_of_memory_begins_anew_with_smaller_chunks(
    merged, tmp_path, monkeypatch, side_input, function
) -> None:
    import mergekit_lab.runs.curvature as room

    _, store = merged
    tried, compute = [], getattr(room, function)

    def limit_memory(limit: int):
        def compute_or_fail(model, batches, **options):
            def yield_fitting():
                for batch in batches:
                    yield batch
                    if tried[-1] > limit:  # in the middle of the work
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

            batches = list(batches)
            tried.append(len(batches[0][1]))
            return compute(model, yield_fitting(), **options)

        return compute_or_fail

    shared = [
        "stage=curvature",
        f"curvature={side_input}",
        "merger=average",
        "only=[digits]",
        "curvature.samples=7",
    ]
    monkeypatch.setattr(room, function, limit_memory(0))
    with pytest.raises(InputError, match=rf"{side_input} of digits .*curvature.chunk=1 .*device=cpu"):
        go(tmp_path / "a", store, *shared, "curvature.chunk=4")
    assert tried == [4, 2, 1]
    before = list_keys(store, f"{side_input}s")
    monkeypatch.setattr(room, function, limit_memory(2))
    go(tmp_path / "b", store, *shared, "curvature.chunk=4")
    (key,) = list_keys(store, f"{side_input}s") - before
    monkeypatch.setattr(room, function, compute)
    other = tmp_path / "store"
    shutil.copytree(store / "experts", other / "experts")
    go(tmp_path / "c", other, *shared, "curvature.chunk=2")
    file = f"{side_input}s/{key}/{side_input}.safetensors"
    assert (store / file).read_bytes() == (other / file).read_bytes()


def test_a_fisher_from_the_first_moment_has_a_name_of_its_own_and_is_merged_with(merged, tmp_path) -> None:
    _, store = merged
    before = list_keys(store, "fishers")
    go(tmp_path / "a", store, "merger=fisher", "stage=[curvature,merge]", "curvature.estimate=first_moment")
    (one, other) = list_keys(store, "fishers") - before
    fisher = open_checkpoint(store / "fishers" / one / "fisher.safetensors")
    assert all(bool((fisher[name] >= 0).all()) for name in fisher)
    assert any(fisher[name].any() for name in fisher)
    curvature = json.loads((store / "fishers" / other / "manifest.json").read_text())["content"]["curvature"]
    assert curvature == {"samples": 8, "sampled": False, "estimate": "first_moment", "batch_size": 16}


def test_a_fraction_is_a_prefix_of_the_same_shuffle(tmp_path) -> None:
    from mergekit_lab.runs.curvature import list_batches
    from mergekit_lab.runs.run import Run

    cfg, choices = compose_config([*TINY, f"store.root={tmp_path}"])
    context = Run(cfg, tmp_path, choices)
    few = torch.cat([x for x, _ in list_batches(context, "fisher", "digits", 6, 4)])
    more = torch.cat([x for x, _ in list_batches(context, "fisher", "digits", 20, 7)])
    assert torch.equal(few, more[:6])
    assert not torch.equal(few, context.tasks["digits"].load_samples("train").images[:6] / 255)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["curvature.kind=grma"], "curvature.kind is 'grma'.*'gram'"),
        (["curvature.fraction=0.5"], "set one and leave"),
        (["curvature.samples=null"], "set one and leave"),
        (["curvature.samples=null", "curvature.fraction=1.5"], r"fraction is 1.5.*in \(0, 1\]"),
        (["curvature.chunk=0"], "curvature.chunk is 0"),
        (["curvature.estimate=moment"], "curvature.estimate is 'moment'.*'first_moment'"),
        (["curvature.estimate=first_moment", "curvature.sampled=true"], r"set curvature\.estimate=per_sample"),
    ],
)
def test_a_wrong_setting_is_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(InputError, match=match):
        check(compose_config(overrides)[0])


def test_masks_are_trained_in_the_merge(merged, tmp_path) -> None:
    """They begin at the half of largest entries and end elsewhere."""
    folder, store = merged
    before = {*(store / "merged").iterdir()}
    how = "{_target_: mergekit_lab.merging.Localization, epochs: 2, start: 0.5, lr: 1.0e+6}"
    go(tmp_path, store, "merger=localize_stitch", f"merger.learn={how}", "joint=false", "stage=merge")
    (mask_folder,) = {*(store / "merged").iterdir()} - before
    base = OpenClip("glyph-clip", "asset:glyph_clip").make_model().state_dict()
    experts = [
        store / "experts" / r.model_key for r in read_records(folder / "records.jsonl") if r.kind == "expert"
    ]
    untrained = merge_state_dicts(base, experts, LocalizeStitch(density=0.5))
    stored, name = open_checkpoint(mask_folder), "visual.proj"
    kept = [float((model[name] != base[name]).double().mean()) for model in (stored, untrained)]
    assert 0.05 < kept[0] < 1
    assert abs(kept[0] - kept[1]) > 0.02


def test_a_method_by_task_is_scored_with_each_tasks_own_model(merged, tmp_path) -> None:
    """On the experts that are there."""
    folder, store = merged
    go(tmp_path / "run", store, "merger=emr", "joint=false", "stage=[merge,evaluate]")
    (artifact,) = {parts.parent for parts in (store / "merged").glob("*/tasks")}
    base = OpenClip("glyph-clip", "asset:glyph_clip").make_model().state_dict()
    experts = {
        r.task: open_checkpoint(store / "experts" / r.model_key / "model.safetensors")
        for r in read_records(folder / "records.jsonl")
        if r.kind == "expert"
    }
    for task, other in (("digits", "latin"), ("latin", "digits")):
        model, name = LowRank(artifact / "tasks", open_checkpoint(base), task, [task]), "visual.proj"
        near, far = (float((model[name] - experts[t][name]).norm()) for t in (task, other))
        assert near < 0.8 * far, task
    manifests = [json.loads(file.read_text()) for file in (store / "evaluations").glob("*/manifest.json")]
    scored = [m["content"]["task"] for m in manifests if m["content"]["model"] == artifact.name]
    assert sorted(scored) == ["digits", "latin"]
    with pytest.raises(InputError, match="coefficient cannot be searched"):
        go(tmp_path / "no", store, "merger=tsvc", "joint=false", "merger.coefficient=null")
