"""Published numbers: every shipped table reads and is consistent, and stands in reports with the difference."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest
from reporting.conftest import make_study
from reporting.test_report import Page, report

from mergekit_lab import InputError
from mergekit_lab.paths import conf_dir
from mergekit_lab.reporting import Beside, compare, read_published, set_beside
from mergekit_lab.reporting.published import conditions, unite

FOLDER = Path(__file__).parents[2] / "mergekit_lab" / "assets" / "published"
SOURCES = sorted(path.stem for path in FOLDER.glob("*.csv"))
MEASURES = {"average", "normalized", "steps_per_second", "gigabytes", "merge_seconds"}
CLIP8 = ["cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "svhn", "sun397"]
OF_EXPERTS = {"training_seconds", "ks_distance", "mean_log_likelihood"}


def _tables(source: str) -> list[str]:
    lines = [line for line in (FOLDER / f"{source}.csv").read_text().splitlines() if not line.startswith("#")]
    return sorted({row["table"] for row in csv.DictReader(lines)})


@pytest.mark.parametrize("source", SOURCES)
def test_every_table_says_its_source_and_names_what_exists(source: str) -> None:
    assert (FOLDER / f"{source}.csv").read_text().startswith("# ")
    options = {group: {f.stem for f in (conf_dir() / group).glob("*.yaml")} for group in
               ("backbone", "finetuning", "optimizer", "merger")}  # fmt: skip
    tasks = {file.stem for file in (conf_dir() / "task" / "clip").glob("*.yaml")}
    texts = [f.stem for kind in ("trace", "glue") for f in (conf_dir() / "task").glob(f"{kind}_*")]
    tasks |= {name.partition("_")[2] for name in texts}
    for table in _tables(source):
        rows = read_published(f"{source} {table}")
        assert conditions(f"{source} {table}")[0] <= tasks
        assert len({(r.when, r.backbone, r.finetuning, r.optimizer, r.row, r.column) for r in rows}) == len(
            rows
        )
        for row in rows:
            assert row.backbone in options["backbone"]
            assert row.optimizer in options["optimizer"]
            assert row.finetuning in options["finetuning"]
            assert row.row in options["merger"] | {"experts", "zero_shot", "untuned"} | OF_EXPERTS
            assert row.column in tasks | MEASURES
            assert 0 <= row.value < (10_000 if row.row == "training_seconds" else 130)


@pytest.mark.parametrize(
    "name", ["mergopt 9", "epimer 6", "fusion_bench 8 tasks", "mergopt_trace 15", "mergopt_trace 17"]
)
def test_printed_averages_are_the_means_of_their_rows(name: str) -> None:
    """But for rounding, and for DARE on plain experts in MergOPT's table: 67.0 is printed, the mean is 66.7."""
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in read_published(name):
        found[row.backbone, row.finetuning, row.optimizer, row.row][row.column] = row.value
    found.pop(("clip_vit_b32", "full", "adamw", "dare"), None)
    for values in found.values():
        average = values.pop("average")
        assert not values or sum(values.values()) / len(values) == pytest.approx(average, abs=0.11)


def test_a_table_is_set_beside_what_one_cell_measured() -> None:
    axes = {"backbone": "clip_vit_b32", "finetuning": "full", "optimizer": "asam"}
    ours = {("task_arithmetic", "average"): 70.0}
    rows = set_beside("saft C3", lambda row, column: ours.get((row, column)), axes, lambda when: True, CLIP8)
    assert {row.row for row in rows} == {"average", "task_arithmetic", "ties"}
    known = next(row for row in rows if row.ours is not None)
    assert (known.published, known.difference) == (69.45, pytest.approx(0.55))
    assert all(row.difference is None for row in rows if row is not known)


def test_rows_hold_only_under_their_settings() -> None:
    axes = {"backbone": "clip_vit_b32", "finetuning": "full", "optimizer": "adamw"}
    weights = "backbone.weights=openai"
    rows = set_beside(
        "saft C1", lambda *_: 90.0, axes, lambda when: when in ("training.steps=4000", weights), CLIP8
    )
    assert [row.published for row in rows] == [90.21]


def test_a_table_stands_only_beside_runs_of_its_tasks_and_weights() -> None:
    axes = {"backbone": "clip_vit_b32", "finetuning": "full", "optimizer": "adamw"}

    def beside(name: str, tasks: list[str], weights: str = "openai") -> set[tuple[str, str]]:
        def holds(when: str) -> bool:
            return "backbone.weights=" not in when or f"backbone.weights={weights}" in when

        return {(row.row, row.column) for row in set_beside(name, lambda *_: 90.0, axes, holds, tasks)}

    assert ("ties", "average") in beside("fusion_bench 8 tasks", CLIP8)
    single = {(row, task) for row in ("experts", "zero_shot") for task in CLIP8}
    assert beside("fusion_bench 8 tasks", [*CLIP8, "stl10"]) == single
    assert not beside("fusion_bench 8 tasks", CLIP8, "asset:glyph_clip")
    assert beside("epimer 6", CLIP8[:2]) == single


def test_an_unknown_table_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="no source 'saftt'; did you mean 'saft'"):
        read_published("saftt 1")
    with pytest.raises(InputError, match="saft has no table 'C33'; did you mean 'C3'"):
        read_published("saft C33")


MEASURED = Beside("saft", "1", "clip_vit_b32 full asam", "ties", "average", 75.45, 76.0)
LACKING = Beside("saft", "1", "clip_vit_b32 full asam", "ties", "average", 75.45, None)


def test_the_report_shows_both_numbers_and_the_difference(tmp_path) -> None:
    paths = report(tmp_path, make_study(2, 1), published=[MEASURED])
    assert (
        "| saft 1 | clip_vit_b32 full asam | TIES | average | 75.45 | 76.00 | +0.55 |"
        in paths.summary.read_text()
    )
    assert ["saft 1", "clip_vit_b32 full asam", "TIES", "average", "75.45", "76.00", "+0.55"] in Page(
        paths.html.read_text()
    ).rows


def test_a_comparison_takes_each_number_from_the_job_that_measured_it(tmp_path) -> None:
    report(tmp_path / "a", make_study(2, 1), published=[LACKING])
    report(tmp_path / "b", make_study(2, 1), published=[MEASURED])
    paths = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert paths.summary.read_text().count("| saft 1 |") == 1
    assert "+0.55" in paths.summary.read_text()
    assert unite([("", [LACKING])]) == ([LACKING], [])
