"""Stage analyze: every analysis of the group on two tiny experts, drawn, found again, resumed."""

import json
import re
import shutil
import struct
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from composing import TINY, compose_config, go
from hydra.utils import get_class
from pictures import leave_undrawn

from mergekit_lab import InputError
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.reporting import read_records
from mergekit_lab.reporting.drawing import save_figure
from mergekit_lab.runs import analyze as stage
from mergekit_lab.runs.analyses import Analysis, contract, paths, planes, sweeps, vectors
from mergekit_lab.runs.merge import declare_merged
from mergekit_lab.runs.run import Run
from mergekit_lab.schema.check import build

OTHER = (
    "{_target_: mergekit_lab.tasks.Digits, name: other, seed: 3, train_size: 60, validation_size: 40, "
    "test_size: 50}"
)
SMALL = {
    "task_vectors": ["analysis.values=8"],
    "alpha_sweep": ["analysis.points=3", "analysis.samples=20"],
    "landscape": ["analysis.points=3", "analysis.samples=20"],
    "disentanglement": ["analysis.points=3", "analysis.samples=20"],
    "barrier": ["analysis.points=3", "analysis.samples=20"],
    "ctl": ["analysis.samples=6"],
    "jtl": ["analysis.points=3", "analysis.samples=20"],
    "rank_sweep": [
        *("merger=tsvm", "analysis.ranks=[1,3]"),
        *("analysis.coefficients=[0.5,1.0]", "analysis.samples=20"),
    ],
    "expert_count": ["analysis.coefficients=[0.5,1.0]", "analysis.groups=2", "analysis.samples=20"],
    "fisher_fraction": [
        *("merger=fisher", "analysis.fractions=[0.05,0.2]", "analysis.coefficients=[0.5,1.0]"),
        *("analysis.samples=20", "analysis.part=validation", "analysis.batch=4"),
    ],
    "steps": ["analysis.shares=[0.5,1.0]", "analysis.coefficients=[0.5,1.0]", "analysis.samples=20"],
    "distribution": ["analysis.bins=11"],
    "curvature_gain": ["merger=epimer", "stage=[curvature,analyze]", "analysis.samples=20"],
    "cloud": [
        *("stage=[finetune,analyze]", f"+suite.tasks.other={OTHER}"),
        *("analysis.points=3", "analysis.samples=20"),
    ],
    "hessian": ["analysis.points=2", "analysis.samples=4", "analysis.iterations=3", "analysis.products=6"],
}
FILES = sorted((find_conf_dir() / "analysis").glob("*.yaml"))


def list_overrides(name: str) -> list[str]:
    return ["stage=analyze", f"analysis={name}", "joint=false", "merger=task_arithmetic", *SMALL[name]]


def analyze(folder: Path, store: Path, name: str, *overrides: str, drawn: bool = False) -> dict:
    """The numbers; `drawn` makes files of the figure too."""
    with nullcontext() if drawn else patch.object(stage, "save_figure", lambda *_: folder):
        go(folder, store, *list_overrides(name), *overrides)
    return json.loads((folder / f"analysis/{name}.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def _pictures_of_one_pixel():
    """Figures are looked at here."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("analyze")
    go(folder / "run", folder / "store", "merger=task_arithmetic", "joint=false")
    return folder / "run", folder / "store"


def test_every_analysis_has_a_test() -> None:
    assert {file.stem for file in FILES} == set(SMALL)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_field_stands_in_its_file(file: Path) -> None:
    node = yaml.safe_load(file.read_text())
    assert set(node) - {"_target_"} == {field.name for field in fields(get_class(node["_target_"]))}


DRAWN = "landscape"
"""Looked at as files; of the others the figure is made and not rendered."""


@pytest.mark.parametrize("name", list(SMALL))
def test_it_writes_numbers_and_a_figure_and_is_found_again(name: str, trained, tmp_path) -> None:
    _, store = trained
    with nullcontext() if name == DRAWN else leave_undrawn():
        data = analyze(tmp_path / "first", store, name, drawn=True)
    png = (tmp_path / f"first/analysis/{name}.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    if name == DRAWN:
        assert struct.unpack(">II", png[16:24])[0] > 500
        assert "<svg" in (tmp_path / f"first/analysis/{name}.svg").read_text()
    cfg, choices = compose_config([*TINY, f"store.root={store}", *list_overrides(name)])
    run = Run(cfg, tmp_path, choices)
    stored = run.find(stage.declare_analysis(run))
    assert json.loads(stored.find_file(stage.DATA).read_text()) == data


def test_the_analysis_of_the_page_measures_the_stored_experts(trained, tmp_path, monkeypatch) -> None:
    page = (Path(__file__).parents[2] / "docs/analysis.md").read_text()
    (tmp_path / "my_analyses.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    cfg, choices = compose_config([*TINY, f"store.root={trained[1]}", "joint=false"])
    cfg.analysis = {"_target_": "my_analyses.Distance"}
    run = Run(cfg, tmp_path, choices)
    moved = build(cfg.analysis, Analysis).compute(run, tmp_path)
    assert set(moved) == {"digits", "latin"}
    assert all(0.01 < norm < 10 for norm in moved.values())
    drawing = build(cfg.analysis, Analysis).draw(moved)
    with leave_undrawn():
        assert save_figure(tmp_path / "figure.png", drawing.title, drawing.panels).exists()


def test_landscape_and_disentanglement_share_one_pass(trained, tmp_path) -> None:
    _, store = trained
    analyze(tmp_path / "a", store, "landscape")
    before = len(list((store / "analyses").iterdir()))
    data = analyze(tmp_path / "b", store, "disentanglement")
    assert len(list((store / "analyses").iterdir())) == before
    (entry,) = data["pairs"]
    assert entry["pair"] == ["digits", "latin"]
    assert set(entry["measures"]) == {"xi", "loss/digits", "loss/latin", "value/digits", "value/latin"}


def test_a_plane_that_was_cut_goes_on_where_it_was(trained, tmp_path, monkeypatch) -> None:
    _, store = trained
    options = ["analysis.points=4", "analysis.others=0.3"]
    real, counts = planes.evaluate_plane, []

    def cut(*args, start=0, **named):
        for count, row in enumerate(real(*args, start=start, **named)):
            if len(counts) == 2 and start == 0:
                raise KeyboardInterrupt
            counts.append(start + count)
            yield row

    monkeypatch.setattr(planes, "evaluate_plane", cut)
    with pytest.raises(KeyboardInterrupt):
        analyze(tmp_path / "cut", store, "landscape", *options)
    resumed = analyze(tmp_path / "resumed", store, "landscape", *options)
    assert counts == [0, 1, 2, 3]
    monkeypatch.setattr(planes, "evaluate_plane", real)
    shutil.rmtree(store / "analyses")
    whole = analyze(tmp_path / "whole", store, "landscape", *options)
    assert resumed == whole


def test_a_barrier_is_named_once_its_merged_model_is(trained, tmp_path) -> None:
    overrides = [*TINY, f"store.root={tmp_path}", "analysis=barrier", "merger=task_arithmetic", "joint=false"]
    run = Run(compose_config(overrides)[0], tmp_path, {"optimizer": "adamw"})
    node, merged = stage.declare_analysis(run), declare_merged(run, *run.mergers)
    assert [need.kind for need in node.needs] == [*("experts" for _ in run.experts), "merged"]
    assert node.awaits == merged.awaits != ()


def test_a_barrier_that_was_cut_goes_on_where_it_was(trained, tmp_path, monkeypatch) -> None:
    _, store = trained
    options = ["analysis.points=4"]
    real, lines = contract.evaluate_line, []

    def cut(model, start, end, alphas, tasks, size):
        (label,) = tasks
        if lines == ["digits"] and label == "latin" and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        lines.append(label)
        return real(model, start, end, alphas, tasks, size)

    monkeypatch.setattr(contract, "evaluate_line", cut)
    with pytest.raises(KeyboardInterrupt):
        analyze(tmp_path / "cut", store, "barrier", *options)
    (tmp_path / "again").mkdir()
    assert list(analyze(tmp_path / "resumed", store, "barrier", *options)["tasks"]) == ["digits", "latin"]
    assert lines == ["digits", "latin"]


@pytest.mark.parametrize(
    ("name", "where", "what", "pieces"),
    [
        ("task_vectors", vectors.TaskVectors, "measure_spectrum", 2),
        ("distribution", vectors.EntryDistribution, "measure_entries", 3),
        ("curvature_gain", sweeps, "merge_experts", 2),
    ],
)
def test_what_was_finished_of_one_that_was_cut_is_read_back(
    name: str, where, what: str, pieces: int, trained, tmp_path, monkeypatch
) -> None:
    overrides = [f"store.root={trained[1]}", "joint=false", f"analysis={name}", *SMALL[name]]
    cfg, choices = compose_config([*TINY, *overrides])
    if name == "curvature_gain":  # which takes Fishers from the store
        go(tmp_path / "fishers", trained[1], "merger=epimer", "joint=false", "stage=[curvature]")
    context, analysis = Run(cfg, tmp_path, choices), build(cfg.analysis, Analysis)
    real, calls = getattr(where, what), []

    def cut(*args, **named):
        calls.append(what)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **named)

    for part in ("cut", "whole"):
        (tmp_path / part).mkdir()
    monkeypatch.setattr(where, what, cut)
    with pytest.raises(KeyboardInterrupt):
        analysis.compute(context, tmp_path / "cut")
    resumed = analysis.compute(context, tmp_path / "cut")
    assert len(calls) == pieces + 1  # one was begun twice
    assert resumed == analysis.compute(context, tmp_path / "whole")


def test_the_numbers_are_those_of_the_stored_models(trained, tmp_path) -> None:
    """At α = 1 the sweep is the merged model's search, at the barrier's end stands the expert."""
    folder, store = trained
    sweep = analyze(tmp_path / "a", store, "alpha_sweep", "analysis.samples=null")
    searched = json.loads((folder / "searches.json").read_text())["task_arithmetic"]
    at_one = sweep["mergers"]["task_arithmetic"]
    assert sweep["alphas"] == [0.0, 1.0, 2.0]
    wanted = next(p["normalized"] for p in searched if p["coefficient"] == 1.0)
    normalized = sum(at_one[t]["value"][1] / sweep["experts"][t] for t in at_one) / 2
    assert normalized == pytest.approx(wanted, abs=1e-6)
    barrier = analyze(tmp_path / "b", store, "barrier", "analysis.samples=null", "analysis.part=test")
    experts = {r.task: r.value for r in read_records(folder / "records.jsonl") if r.kind == "expert"}
    merged = {r.task: r.value for r in read_records(folder / "records.jsonl") if r.kind == "merged"}
    for task, entry in barrier["tasks"].items():
        assert entry["value"][-1] == pytest.approx(experts[task], abs=1e-6)
        assert entry["value"][0] == pytest.approx(merged[task], abs=1e-6)
        assert entry["barrier"] >= 0


def test_the_hessian_is_reported_with_what_it_took(trained, tmp_path) -> None:
    data = analyze(tmp_path, trained[1], "hessian", "analysis.tasks=[latin]")
    assert [(p["task"], p["at"]) for p in data["points"]] == [("latin", 0.0), ("latin", 1.0)]
    for point in data["points"]:
        assert point["iterations"] == 3
        assert isinstance(point["converged"], bool)
        assert point["residual"] > 0


@pytest.mark.parametrize(
    ("name", "override", "match"),
    [
        ("landscape", "analysis.pairs=[[digits,latn]]", "analysis.pairs.*'latn'.*'latin'"),
        ("landscape", "analysis.pairs=[[digits,digits]]", "two different tasks"),
        ("landscape", "analysis.tasks=both", "analysis.tasks is 'both'"),
        ("landscape", "analysis.pairs=[]", r"analysis.pairs is \[\]"),
        ("ctl", "analysis.pairs=[digits,latin]", r"list\[list\[str\]\]"),
        ("landscape", "analysis.box=[1]", "analysis.box is"),
        ("landscape", "analysis.box=[a,b]", r"analysis.box.*list\[float\]"),
        ("disentanglement", "analysis.box=[1,0]", "analysis.box.*<"),
        ("landscape", "analysis.samples=0", "analysis.samples is 0.*1"),
        ("rank_sweep", "analysis.samples=-1", "analysis.samples is -1"),
        ("hessian", "analysis.samples=0", "analysis.samples is 0"),
        ("hessian", "analysis.tasks=[]", r"analysis.tasks is \[\]"),
        ("rank_sweep", "analysis.coefficients=[]", "analysis.coefficients is"),
        ("rank_sweep", "analysis.ranks=[]", "analysis.ranks is"),
        ("rank_sweep", "analysis.ranks=[0]", r"analysis.ranks is \[0\].*least 1"),
        ("expert_count", "analysis.groups=-1", "analysis.groups is -1.*least 0"),
        ("task_vectors", "analysis.values=0", "analysis.values is 0"),
        ("curvature_gain", "merger=tsvm", "merger.*EpiMer.*merger=epimer"),
        ("landscape", "analysis.points=1", "with 1 points"),
        ("ctl", "analysis.part=tset", "analysis.part is 'tset'.*'test'"),
        ("barrier", "analysis.merger=ties", "analysis.merger is 'ties'.*task_arithmetic"),
        ("hessian", "analysis.tasks=[mnist]", "analysis.tasks names 'mnist'"),
        ("alpha_sweep", "merger=average", "merger.*coefficient"),
        ("fisher_fraction", "merger=average", "merger.*Fishers"),
        ("fisher_fraction", "analysis.fractions=[0.0]", r"analysis.fractions is .* in \(0, 1\]"),
        ("steps", "training.epochs=2", "for parts of training.steps"),
        ("task_vectors", "+analysis.rnak=2", "'analysis.rnak'.*'rank'"),
    ],
)
def test_a_wrong_setting_is_named(name: str, override: str, match: str, trained, tmp_path) -> None:
    with pytest.raises(InputError, match=match):
        analyze(tmp_path, trained[1], name, override)


def test_losses_that_overflow_are_null_in_the_store_and_leave_a_figure(trained, tmp_path) -> None:
    far = ["analysis.points=2", "analysis.low=-1e20", "analysis.high=1e20"]
    with leave_undrawn():
        data = analyze(tmp_path / "a", trained[1], "landscape", *far, drawn=True)
        lines = analyze(tmp_path / "b", trained[1], "alpha_sweep", *far, drawn=True)
    (entry,) = data["pairs"]
    assert any(None in row for row in entry["measures"]["loss/digits"])
    assert None in lines["mergers"]["task_arithmetic"]["digits"]["loss"]
    assert (tmp_path / "a/analysis/landscape.png").is_file()


def test_a_task_whose_expert_scores_zero_does_not_choose_the_coefficient(
    trained, tmp_path, monkeypatch
) -> None:
    """Without it latin's values over next to nothing would decide."""
    values = {"digits": {0.5: 0.8, 1.0: 0.4}, "latin": {0.5: 0.0, 1.0: 0.01}}
    own = {"digits": 0.8, "latin": 0.0}

    def evaluate(model, start, end, alphas, tasks, size):
        def get_value(task, alpha):
            return own[task] if len(tasks) == 1 else values[task][alpha]

        return {t: {"loss": [1.0] * len(alphas), "value": [get_value(t, a) for a in alphas]} for t in tasks}

    monkeypatch.setattr(contract, "evaluate_line", evaluate)
    (point,) = analyze(tmp_path / "a", trained[1], "expert_count", "analysis.samples=19")["points"]
    assert (point["coefficient"], point["normalized"], point["left_out"]) == (0.5, 1.0, ["latin"])
    assert point["value"] == pytest.approx(0.4)
    own["digits"] = 0.0
    (point,) = analyze(tmp_path / "b", trained[1], "expert_count", "analysis.samples=18")["points"]
    assert (point["coefficient"], point["normalized"]) == (0.5, None)
    swept = {"task_arithmetic": {t: {"value": [0.4, 0.01]} for t in values}}
    data = {"alphas": [0.5, 1.0], "experts": {"digits": 0.8, "latin": 0.0}, "mergers": swept}
    drawing = paths.AlphaSweep().draw(data)
    assert [p["y"] for p in drawing.panels[0]["data"]["values"]] == pytest.approx([50.0, 1.25])
    assert "without latin" in drawing.panels[0]["title"]


def test_the_ends_of_a_way_between_experts_lie_on_the_straight_line(trained, tmp_path) -> None:
    data = analyze(tmp_path, trained[1], "jtl")
    (entry,) = data["pairs"]
    assert entry["pair"] == ["digits", "latin"]
    assert entry["delta"][0] == entry["delta"][-1] == 0
    assert entry["delta"][1] == pytest.approx(entry["loss"][1] - (entry["loss"][0] + entry["loss"][2]) / 2)


def test_the_largest_rank_is_the_uncapped_merge_and_all_experts_are_the_last_group(trained, tmp_path) -> None:
    curve = analyze(tmp_path / "a", trained[1], "rank_sweep", "analysis.ranks=[1,100000]")
    assert [point["rank"] for point in curve["points"]] == [1, 100000]
    whole = analyze(tmp_path / "b", trained[1], "alpha_sweep", "analysis.low=0.5", "analysis.high=1.0")
    assert whole["alphas"] == [0.5, 0.75, 1.0]
    (group,) = analyze(tmp_path / "c", trained[1], "expert_count")["points"]
    assert group["tasks"] == ["digits", "latin"]
    assert group["coefficient"] in (0.5, 1.0)
    tasks = whole["mergers"]["task_arithmetic"]
    shares = [sum(tasks[t]["value"][i] / whole["experts"][t] for t in tasks) / 2 for i in (0, 2)]
    assert group["normalized"] == pytest.approx(max(shares))


def test_a_share_of_all_samples_is_the_runs_own_fisher(trained, tmp_path) -> None:
    _, store = trained
    points = analyze(
        tmp_path / "a", store, "fisher_fraction", "analysis.fractions=[0.05,1.0]", "analysis.batch=null"
    )["points"]
    assert [(p["fraction"], p["samples"]) for p in points] == [(0.05, [3, 5]), (1.0, [60, 104])]
    assert {p["coefficient"] for p in points} == {1.0}  # a Fisher average has none
    before = len(list((store / "fishers").iterdir()))
    go(tmp_path / "b", store, "stage=[curvature,merge]", "merger=fisher", "curvature.samples=null",
       "curvature.fraction=1.0")  # fmt: skip
    assert len(list((store / "fishers").iterdir())) == before


def test_the_whole_number_of_steps_is_the_runs_own_experts(trained, tmp_path) -> None:
    folder, store = trained
    before = len(list((store / "experts").iterdir()))
    points = analyze(tmp_path, store, "steps", "analysis.samples=null", "analysis.part=test")["points"]
    assert [point["steps"] for point in points] == [2, 4]
    assert len(list((store / "experts").iterdir())) <= before + 2
    experts = {r.task: r.value for r in read_records(folder / "records.jsonl") if r.kind == "expert"}
    assert points[1]["experts"] == pytest.approx(experts, abs=1e-6)
    assert set(points[0]["mergers"]) == {"task_arithmetic"}


def test_densities_hold_the_share_they_reach_and_the_sum_is_that_of_all(trained, tmp_path) -> None:
    data = analyze(tmp_path, trained[1], "distribution", "analysis.share=0.9")
    assert list(data) == ["digits", "latin", "+sum"]
    for entry in data.values():
        width = entry["bins"][1] - entry["bins"][0]
        assert sum(entry["density"]) * width == pytest.approx(0.9, abs=0.01)
        assert entry["fits"]["laplace"]["mean_log_likelihood"] > 0
    scales = [data[name]["fits"]["gaussian"]["scale"] for name in ("digits", "latin", "+sum")]
    assert scales[2] < scales[0] + scales[1]


def test_the_curvatures_gain_is_not_negative(trained, tmp_path) -> None:
    data = analyze(tmp_path, trained[1], "curvature_gain")
    assert data["matrices"]
    assert min(data["eta"]) >= 0
    assert set(data["losses"]) == {"curved", "flat"}
