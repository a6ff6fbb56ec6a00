"""The whole path on two tasks, and what a second run finds."""

import errno
import json
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from composing import TINY, compose_config, go
from omegaconf import OmegaConf

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.evaluation import score
from mergekit_lab.reporting import read_records
from mergekit_lab.reporting.names import display_name
from mergekit_lab.reporting.records import Failure
from mergekit_lab.reporting.run_files import read_run
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.run import Run

MERGERS = ["average", "task_arithmetic", "ties", "dare", "fisher", "tsvm", "epimer"]


def count(store: Path, kind: str) -> int:
    return len(list((store / kind).glob("*/manifest.json")))


TOKENS = {"WANDB_API_KEY": "k0" * 20, "HF_TOKEN": "hf_t0psecret", "HUGGING_FACE_HUB_TOKEN": "hf_0ldsecret"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TOKENS.items():
            patch.setenv(name, value)
        go(folder / "first", folder / "store")
    return folder / "first", folder / "store"


def test_it_leaves_a_table_records_figures_and_a_page(finished) -> None:
    folder, _ = finished
    for name in ("summary.md", "records.jsonl", "report.html", "metrics.csv", "leaderboard.csv"):
        assert (folder / name).stat().st_size > 0
    assert {f.stem for f in (folder / "figures").glob("*.png")} >= {
        "mergers",
        "heatmap",
        "training",
        "coefficients",
    }
    summary = (folder / "summary.md").read_text()
    for row in ("zero-shot", "experts", *map(display_name, MERGERS), "+joint"):
        assert row in summary


def test_no_token_of_the_environment_is_in_what_a_run_writes(finished) -> None:
    written = [file for folder in finished for file in folder.rglob("*") if file.is_file()]
    assert {"records.jsonl", "manifest.json", "report.html", "metrics.csv"} <= {file.name for file in written}
    for token in TOKENS.values():
        assert [file for file in written if token.encode() in file.read_bytes()] == []


def test_every_model_has_a_record_on_every_task_of_its(finished) -> None:
    folder, _ = finished
    records = read_records(folder / "records.jsonl")
    cells = {(r.label, r.task) for r in records}
    assert len(records) == len(cells) == (1 + 1 + len(MERGERS) + 1) * 2
    for r in records:
        expert = next(x for x in records if x.kind == "expert" and x.task == r.task)
        zero_shot = next(x for x in records if x.kind == "zero_shot" and x.task == r.task)
        assert (r.expert_value, r.zero_shot_value) == (expert.value, zero_shot.value)
        assert (r.backbone, r.suite, r.optimizer, r.part) == ("glyph_clip", "glyphs4", "adamw", "test")
        assert (r.coefficient is None) == (r.label in ("zero-shot", "experts", "+joint", "average", "fisher"))


def test_a_record_can_be_recomputed_from_the_stored_model(finished) -> None:
    from mergekit_lab.evaluation import score
    from mergekit_lab.runs.run import Run

    folder, store = finished
    cfg, choices = compose_config([*TINY, f"store.root={store}"])
    context = Run(cfg, folder, choices)
    record = next(r for r in read_records(folder / "records.jsonl") if r.merger == "tsvm" and r.task == "latin")
    model = open_checkpoint(store / "merged" / record.model_key)
    context.model.load_state_dict({name: model[name] for name in model})
    assert score(context.model, context.make_objective("latin"), "test").value == pytest.approx(record.value)


def test_a_second_run_finds_everything_and_says_the_same(finished, tmp_path, monkeypatch) -> None:
    first, store = finished
    monkeypatch.setattr("mergekit_lab.training.fit.finetune", None)
    monkeypatch.setattr("mergekit_lab.runs.combine.merge_state_dicts", None)
    monkeypatch.setattr("mergekit_lab.runs.models.score", None)
    go(tmp_path, store)
    again, before = (read_records(p / "records.jsonl") for p in (tmp_path, first))
    assert all(r.reused for r in again)
    assert not any(r.reused for r in before)
    assert [(r.identity, r.value) for r in again] == [(r.identity, r.value) for r in before]


def test_an_artifact_that_several_stages_or_searches_need_counts_once(finished) -> None:
    folder, store = finished
    timings = read_run(folder).timings
    made = {kind.name: count(store, kind.name) for kind in store.iterdir() if kind.name != "heads"}
    assert sum(timing.computed for timing in timings.values()) == sum(made.values())
    assert timings["merge"].computed == made["merged"] + made["searches"] + 2  # experts on validation
    assert not any(timing.reused for timing in timings.values())


def test_the_coefficient_was_chosen_on_validation_by_normalized_accuracy(finished) -> None:
    folder, _ = finished
    searches = json.loads((folder / "searches.json").read_text())
    assert set(searches) == {"task_arithmetic", "ties", "dare", "tsvm", "epimer"}
    for label, points in searches.items():
        assert [p["coefficient"] for p in points] == [0.2, 1.0]
        chosen = next(p for p in points if p["chosen"])
        assert chosen["normalized"] == max(p["normalized"] for p in points)
        records = [r for r in read_records(folder / "records.jsonl") if r.merger == label]
        assert {r.coefficient for r in records} == {chosen["coefficient"]}


def test_a_merged_model_in_the_store_is_what_the_method_gives(finished) -> None:
    from mergekit_lab.merging import WeightAverage, merge_state_dicts

    folder, store = finished
    records = read_records(folder / "records.jsonl")
    key = next(r.model_key for r in records if r.merger == "average")
    experts = [store / "experts" / r.model_key / "model.safetensors" for r in records if r.kind == "expert"]
    from mergekit_lab.backbones import OpenClip

    base = OpenClip("glyph-clip", "asset:glyph_clip").make_model().state_dict()
    wanted = merge_state_dicts(base, experts, WeightAverage())
    stored = open_checkpoint(store / "merged" / key)
    assert all(torch.equal(stored[name], value) for name, value in wanted.items())


def test_merges_of_a_stage_read_every_expert_once_where_a_device_has_room(
    finished, tmp_path, monkeypatch
) -> None:
    from mergekit_lab.merging import TIES, WeightAverage
    from mergekit_lab.runs import combine

    _, store = finished
    merge_experts = partial(combine.merge_experts, stays=True)
    run = Run(compose_config([*TINY, f"store.root={store}"])[0], tmp_path, {"optimizer": "adamw"})
    opened: list[Path] = []

    def open_counted(path: Path):
        opened.append(path)
        return open_checkpoint(path)

    monkeypatch.setattr(combine, "open_checkpoint", open_counted)
    methods = [WeightAverage(), TIES(density=0.3), TIES(density=0.1)]
    wanted = [merge_experts(run, method) for method in methods]
    assert not opened
    monkeypatch.setattr(run, "read_room", lambda held: 1 << 30)
    for method, state in zip(methods, wanted, strict=True):
        again = merge_experts(run, method)
        assert all(torch.equal(again[name], value) for name, value in state.items())
    assert len(opened) == len(set(opened)) == len(run.experts)


def test_a_compiled_model_scores_the_same_and_one_that_cannot_be_compiled_runs_as_written(
    finished, tmp_path, monkeypatch, caplog
) -> None:
    _, store = finished
    compiles = torch.compile
    monkeypatch.setattr("torch.compile", lambda model, options: compiles(model, backend="eager"))
    cfg = compose_config([*TINY, f"store.root={store}", "evaluation_compile=true"])[0]
    run = Run(cfg, tmp_path, {"optimizer": "adamw"})
    model = run.find_model_to_score("digits")
    assert model is not run.model
    assert run.find_model_to_score("latin") is model
    run.model.load_state_dict({n: t + 0.01 for n, t in run.base_state.items()})
    values = [score(each, run.make_objective("digits"), "test").predictions for each in (model, run.model)]
    assert values[0] == values[1]

    monkeypatch.setattr("torch.compile", lambda model, options: compiles(model, backend="no_such_backend"))
    run = Run(cfg, tmp_path, {"optimizer": "adamw"})
    assert run.find_model_to_score("digits") is run.model
    assert "evaluation_compile: the model cannot" in caplog.text


def test_only_what_decides_an_expert_makes_a_new_one(finished, tmp_path) -> None:
    _, store = finished

    def list_keys(*overrides: str) -> dict[str, str]:
        run = Run(
            *compose_config([*TINY, f"store.root={store}", *overrides])[:1], tmp_path, {"optimizer": "adamw"}
        )
        return {task: declare_expert(run, task).key for task in run.tasks}

    keys_before = list_keys()
    assert all((store / "experts" / key).is_dir() for key in keys_before.values())
    assert (
        list_keys("merger=ties", "search=none", "logger=csv", "evaluation_batch_size=7", "joint=false")
        == keys_before
    )
    others = [["training.lr=1e-4"], ["seed=1"], ["optimizer=sam"], ["optimizer=sam", "optimizer.rho=0.1"]]
    new = {key for each in others for key in list_keys(*each).values()}
    assert len(new - set(keys_before.values())) == 2 * len(others)
    of_digits = list_keys("suite.tasks.digits.seed=5")
    assert of_digits["latin"] == keys_before["latin"]
    assert of_digits["digits"] != keys_before["digits"]


def test_a_stage_whose_input_is_missing_says_which_to_run(tmp_path) -> None:
    with pytest.raises(InputError, match="stage=finetune"):
        go(tmp_path / "run", tmp_path / "store", "stage=merge")
    failure = json.loads((tmp_path / "run/failure.json").read_text())
    assert "run stage=finetune first" in failure["error"]
    assert "stage=merge" in failure["overrides"]


def test_a_mistake_leaves_an_earlier_run_in_its_folder_as_it_was(finished, tmp_path) -> None:
    folder, store = finished
    run_dir = shutil.copytree(folder, tmp_path / "run")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for wrong in (["+sede=1"], ["training.steps=0"], ["stage=merge", "seed=7"], ["stage=analyze", "seed=7"]):
        with pytest.raises(InputError):
            go(run_dir, store, *wrong)
        assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    with pytest.raises(InputError):  # in a job of a sweep they would pass for its own results
        go(run_dir, store, "+sede=1", "hydra.job.num=0")
    assert "sede" in json.loads((run_dir / "failure.json").read_text())["error"]


def test_wandb_offline_runs_the_same_path_and_writes_no_token(finished, tmp_path, monkeypatch) -> None:
    _, store = finished
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    go(tmp_path / "run", store, "logger=wandb")
    import wandb

    wandb.teardown()
    assert list((tmp_path / "run").rglob("*.wandb"))
    written = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not any(token.encode() in content for token in TOKENS.values() for content in written)


def test_two_dimensions_of_the_report_are_written_against_each_other(finished, tmp_path) -> None:
    _, store = finished
    go(tmp_path, store, "stage=report", "table=merger*task", "metric=value")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == "| merger × task | digits | latin |"
    records = read_records(tmp_path / "records.jsonl")
    ties = next(line for line in lines if line.startswith("| TIES |"))
    for record in records:
        if record.merger == "ties":
            assert f"{100 * record.value:.1f}" in ties
    go(tmp_path / "job", store, "stage=report", "table=optimizer*task@merger:slerp")  # another job's
    assert (tmp_path / "job/records.jsonl").is_file()
    assert not (tmp_path / "job/table.md").exists()
    for wrong, match in (
        ("table=mergers*task", "'mergers'.*'merger'"),
        ("table=optimizer*task", "make merger one of"),
        ("metric=values", "metric is 'values'.*'value'"),
    ):
        with pytest.raises(InputError, match=match):
            go(tmp_path / "wrong", tmp_path / "none", wrong)
    assert not (tmp_path / "none").exists()  # before any work


@pytest.mark.parametrize("device", ["null", "1.5", "[nan]", "{a:1}", "[]", "true"])
def test_what_is_no_device_is_refused_by_name(tmp_path, device: str) -> None:
    with pytest.raises(InputError, match=r"device is "):
        go(tmp_path / "run", tmp_path / "store", f"device={device}")
    assert not (tmp_path / "store").exists()


def test_a_disk_that_is_full_in_the_report_says_so_and_loses_nothing(finished, tmp_path, monkeypatch) -> None:
    _, store = finished

    def fill_up(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mergekit_lab.runs.report.write_report", fill_up)
    with pytest.raises(InputError, match="run_dir=PATH"):
        go(tmp_path, store, "stage=report")


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """As on a disk that fills up: writing beyond so many bytes fails."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_is_full_before_the_run_is_named_before_it(tmp_path) -> None:
    from hydra_plugins.mergekit_lab.run_folder import RunFolder

    folders = {mode: {"dir": str(tmp_path / "run")} for mode in ("run", "sweep")}
    config = OmegaConf.create({"hydra": {"overrides": {"task": [], "hydra": []}, **folders}})
    begin = RunFolder()
    with limit_file_size(1 << 16):
        for told_of in (begin.on_run_start, begin.on_multirun_start):
            with pytest.raises(SystemExit, match="run_dir="):
                told_of(config)
    begin.on_run_start(config)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("experts", ["stage=finetune", "joint=false", "only=[digits]"]),
        ("merged", ["stage=merge", "merger=average"]),
    ],
)
def test_a_disk_that_is_full_in_training_or_a_merge_says_so_and_loses_nothing(
    finished, tmp_path, kind: str, asked: list[str]
) -> None:
    _, whole = finished
    store = tmp_path / "store"
    if kind == "merged":
        shutil.copytree(whole / "experts", store / "experts")
    with limit_file_size(1 << 16), pytest.raises(InputError, match="no room for more"):
        go(tmp_path / "run", store, *asked)
    assert count(store, kind) == 0
    assert list((store / "locks").iterdir()) == []
    go(tmp_path / "run", store, *asked)
    (model_file,) = (store / kind).glob("*/model.safetensors")
    assert model_file.read_bytes() == (whole / model_file.relative_to(store)).read_bytes()


def test_a_stored_head_with_a_flipped_bit_is_refused_by_name(finished, tmp_path) -> None:
    _, store = finished
    shutil.copytree(store, tmp_path / "store")
    head = next((tmp_path / "store/heads").glob("*/head.safetensors"))
    head.write_bytes(head.read_bytes()[:-1] + b"\x7f")
    shutil.rmtree(tmp_path / "store/evaluations")
    with pytest.raises(InputError, match=rf"stored heads {head.parent.name} is damaged"):
        go(tmp_path / "run", tmp_path / "store", "stage=evaluate", "merger=average")


def test_a_run_that_is_killed_does_not_pass_for_the_earlier_one_of_its_folder(
    finished, tmp_path, monkeypatch
) -> None:
    folder, store = finished
    shutil.copytree(folder, tmp_path / "again")

    def interrupt(context: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mergekit_lab.runs.report.stage_report", interrupt)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "again", store, "stage=report", "seed=7")
    left = read_run(tmp_path / "again")
    assert isinstance(left, Failure)
    assert left.overrides == ("stage=report", "seed=7")
    assert "it has not ended" in left.error
    go(tmp_path / "again", store, "stage=report")
    assert not isinstance(read_run(tmp_path / "again"), Failure)


def test_runs_that_are_there_are_compared_from_their_folders_alone(finished, tmp_path) -> None:
    folder, _ = finished
    sweep = tmp_path / "sweep"
    for job in ("0", "10", "2"):
        shutil.copytree(folder, sweep / job)
    (sweep / "2/records.jsonl").unlink()
    (sweep / "2/failure.json").write_text(json.dumps({"overrides": ["seed=2"], "error": "lost"}))
    (sweep / "3/.hydra").mkdir(parents=True)
    out = tmp_path / "out"
    shared = ["stage=report", f"runs=[{folder},{sweep}]", "table=merger*task"]
    go(out, tmp_path / "none", *shared)
    assert len(read_records(out / "records.jsonl")) == len(read_records(folder / "records.jsonl"))
    assert "lost" in (out / "summary.md").read_text()
    assert "did not reach its report" in (out / "summary.md").read_text()
    assert "Configuration of " in (out / "report.html").read_text()
    assert (out / "table.tex").is_file()
    assert not (tmp_path / "none").exists()
    for wrong, match in (
        ([f"runs={tmp_path}/nowhere", "stage=report"], "no such folder"),
        ([f"runs={tmp_path}", "stage=report"], "holds no run"),
        ([f"runs={folder}"], "stage=report"),
    ):
        with pytest.raises(InputError, match=match):
            go(tmp_path / "x", tmp_path / "none", *wrong)
