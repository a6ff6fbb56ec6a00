"""Published numbers: every shipped table reads and is consistent, and stands in reports with the difference."""

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from reporting.conftest import make_study
from reporting.pages import ParsedPage, report

from mergekit_lab import InputError
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.reporting import Beside, compare, paper_tables, set_beside
from mergekit_lab.reporting.paper_tables import find_conditions, find_doubt, read_published
from mergekit_lab.reporting.published import unite

FOLDER = Path(__file__).parents[2] / "mergekit_lab" / "assets" / "published"
SOURCES = sorted(path.stem for path in FOLDER.glob("*.csv"))
MEASURES = {"average", "normalized", "steps_per_second", "gigabytes", "merge_seconds"}
CLIP8 = ["cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "svhn", "sun397"]
OF_EXPERTS = {"training_seconds", "ks_distance", "mean_log_likelihood"}


def _list_tables(source: str) -> list[str]:
    lines = [line for line in (FOLDER / f"{source}.csv").read_text().splitlines() if not line.startswith("#")]
    return sorted({row["table"] for row in csv.DictReader(lines)})


@pytest.mark.parametrize("source", SOURCES)
def test_every_table_says_its_source_and_names_what_exists(source: str) -> None:
    assert (FOLDER / f"{source}.csv").read_text().startswith("# ")
    options = {group: {f.stem for f in (find_conf_dir() / group).glob("*.yaml")} for group in
               ("backbone", "finetuning", "optimizer", "merger")}  # fmt: skip
    tasks = {file.stem for file in (find_conf_dir() / "task" / "clip").glob("*.yaml")}
    texts = [f.stem for prefix in ("trace", "glue") for f in (find_conf_dir() / "task").glob(f"{prefix}_*")]
    tasks |= {name.partition("_")[2] for name in texts}
    for table in _list_tables(source):
        rows = read_published(f"{source} {table}")
        assert find_conditions(f"{source} {table}")[0] <= tasks
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
    means: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in read_published(name):
        means[row.backbone, row.finetuning, row.optimizer, row.row][row.column] = row.value
    means.pop(("clip_vit_b32", "full", "adamw", "dare"), None)
    for values in means.values():
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


AXES = {"backbone": "clip_vit_b32", "finetuning": "full", "optimizer": "adamw"}


def make_equal_but(**others: str):
    """A run that is as every row says, but for some settings, with dots in place of `__`."""
    changed = {key.replace("__", "."): value for key, value in others.items()}

    def holds(when: str) -> bool:
        key, _, value = when.partition("=")
        return changed.get(key.removesuffix("?"), value) == value

    return holds


def test_rows_hold_only_under_their_settings() -> None:
    holds = make_equal_but(training__steps="4000")
    assert [row.published for row in set_beside("saft C1", lambda *_: 90.0, AXES, holds, CLIP8)] == [90.21]


@pytest.mark.parametrize(
    ("name", "optimizer", "row", "key"),
    [
        ("mergopt_trace 20", "adamw", "ties", "optimizer_of"),
        ("mergopt_trace 1", "adamw", "task_arithmetic", "mergers.task_arithmetic.coefficient"),
        ("mergopt_trace 1", "mergopt", "experts", "optimizer.coefficients"),
        ("mergopt_trace 1", "mergopt", "experts", "optimizer.max_experts"),
        ("mergopt 9", "mergopt", "average", "optimizer.scale"),
        ("saft C3", "asam", "ties", "optimizer.rho"),
        ("saft C3", "asam", "average", "optimizer.scaling"),
        ("saft C3", "adamw", "ties", "mergers.ties.preset"),
        ("saft C3", "adamw", "ties", "mergers.ties.aggregator"),
        ("saft C3", "adamw", "task_arithmetic", "search.coefficients"),
        ("saft C3", "adamw", "average", "backbone.head"),
        ("epimer 6", "adamw", "epimer", "mergers.epimer.normalize"),
        ("epimer 7", "adamw", "epimer", "mergers.epimer.aggregator"),
        ("mergopt 9", "adamw", "wudi", "mergers.wudi.coefficient"),
    ],
)
def test_a_number_never_stands_beside_a_run_of_another_setting(name, optimizer, row, key) -> None:
    published = [r for r in read_published(name) if (r.optimizer, r.row) == (optimizer, row)]
    axes = {axis: getattr(published[0], axis) for axis in AXES}
    tasks = find_conditions(name)[0] or {"any"}

    def list_rows(**others: str) -> list[Beside]:
        comparisons = set_beside(name, lambda *_: 90.0, axes, make_equal_but(**others), tasks)
        return [r for r in comparisons if r.row == row]

    assert list_rows()
    assert not list_rows(**{key.replace(".", "__"): "other"})


def test_experts_of_two_optimizers_are_no_row_of_one_alone() -> None:
    axes = {**AXES, "backbone": "llama32_1b"}
    mixed = make_equal_but(optimizer_of="{numglue_ds}")
    rows = set_beside("mergopt_trace 19", lambda *_: 1.0, axes, mixed, ["numglue_cm", "numglue_ds"])
    assert {row.setting.count("optimizer_of.numglue_ds.scale") for row in rows} == {1}


def list_unnamed(sources: list[str]) -> set[str]:
    """Settings of a row's merger and optimizer that no condition names.

    But for what only says where it comes from: seeds, and what the training's own keys decide.
    """
    free = {"defaults", "_partial_", "seed", "lr", "weight_decay", "steps"}

    def list_settings(group: str, option: str) -> set[str]:
        node = yaml.safe_load((find_conf_dir() / group / f"{option}.yaml").read_text())
        inner = node.pop("inner", None) or {}
        return (set(node) | {f"inner.{key}" for key in inner}) - free

    unnamed: set[str] = set()
    for source in sources:
        for name in (f"{source} {table}" for table in _list_tables(source)):
            for row in {replace(r, column="", value=0.0) for r in read_published(name)}:
                named = find_conditions(name, row.optimizer, row.row)[1]
                named = {key.removesuffix("?") for key in named} | {p.split("=")[0] for p in row.when.split()}
                unnamed |= {f"optimizer.{key}" for key in list_settings("optimizer", row.optimizer)} - named
                if row.row not in OF_EXPERTS | {"experts", "zero_shot"}:
                    option = {"untuned": "task_arithmetic"}.get(row.row, row.row)
                    unnamed |= {f"mergers.{row.row}.{key}" for key in list_settings("merger", option)} - named
                if "optimizer_of" not in " ".join(named):
                    unnamed.add("optimizer_of")
    return unnamed


def test_every_row_names_each_setting_of_its_merger_and_its_optimizer() -> None:
    assert list_unnamed(SOURCES) == set()


@pytest.fixture
def conditions(tmp_path, monkeypatch):
    """Conditions that lack a setting, as `write(text)`."""
    file = paper_tables._TABLES

    def write(left_out: str) -> None:
        text = file.read_text()
        assert left_out in text
        (tmp_path / "tables.csv").write_text(text.replace(left_out, ""))
        monkeypatch.setattr(paper_tables, "_TABLES", tmp_path / "tables.csv")
        find_conditions.cache_clear()

    yield write
    find_conditions.cache_clear()


@pytest.mark.parametrize(
    ("left_out", "key", "source", "table", "row"),
    [
        ("optimizer_of={} ", "optimizer_of", "mergopt_trace", "20", "ties"),
        (" optimizer.rho=0.5", "optimizer.rho", "saft", "C3", "ties"),
        (" optimizer.scaling=saft", "optimizer.scaling", "saft", "C3", "average"),
        (" optimizer.max_experts=7", "optimizer.max_experts", "mergopt_trace", "1", "experts"),
        (" mergers.ties.preset=paper", "mergers.ties.preset", "saft", "C3", "ties"),
        (" mergers.epimer.normalize=none", "mergers.epimer.normalize", "epimer", "6", "epimer"),
    ],
)
def test_a_setting_that_no_condition_names_is_found(left_out, key, source, table, row, conditions) -> None:
    """Without it a number stands beside a run of another setting."""
    conditions(left_out)
    assert key in list_unnamed([source])
    name = f"{source} {table}"
    optimizer = {"optimizer.rho": "asam", "optimizer.scaling": "asam", "optimizer.max_experts": "mergopt"}
    optimizer = optimizer.get(key, "adamw")
    published_row = next(r for r in read_published(name) if (r.optimizer, r.row) == (optimizer, row))
    axes = {axis: getattr(published_row, axis) for axis in AXES}
    wrong = make_equal_but(**{key.replace(".", "__"): "other"})
    tasks = find_conditions(name)[0] or {"any"}
    assert row in {r.row for r in set_beside(name, lambda *_: 90.0, axes, wrong, tasks)}


def test_a_table_stands_only_beside_runs_of_its_tasks_and_weights() -> None:
    def set_tables_beside(name: str, tasks: list[str], **others: str) -> set[tuple[str, str]]:
        rows = set_beside(name, lambda *_: 90.0, AXES, make_equal_but(**others), tasks)
        return {(row.row, row.column) for row in rows}

    assert ("ties", "average") in set_tables_beside("fusion_bench 8 tasks", CLIP8)
    single = {(row, task) for row in ("experts", "zero_shot") for task in CLIP8}
    assert set_tables_beside("fusion_bench 8 tasks", [*CLIP8, "stl10"]) == single
    assert not set_tables_beside("fusion_bench 8 tasks", CLIP8, backbone__weights="asset:glyph_clip")
    assert set_tables_beside("epimer 6", CLIP8[:2]) == single


def test_what_is_left_out_and_why_is_logged(caplog) -> None:
    caplog.set_level("INFO")
    set_beside("saft C3", lambda *_: 90.0, AXES, make_equal_but(mergers__ties__preset="sum"), CLIP8)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "saft C3: ties is left out" in line
    assert line.endswith("mergers.ties.preset=paper")


def test_an_unknown_table_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'saftt'.*'saft'"):
        read_published("saftt 1")
    with pytest.raises(InputError, match="has no table 'C33'"):
        read_published("saft C33")


MEASURED = Beside("saft", "1", "clip_vit_b32 full asam", "ties", "average", 75.45, 76.0)
LACKING = Beside("saft", "1", "clip_vit_b32 full asam", "ties", "average", 75.45, None)


def test_the_report_shows_both_numbers_and_the_difference(tmp_path) -> None:
    paths = report(tmp_path, make_study(2, 1), published=[MEASURED])
    assert (
        "| saft 1 | clip_vit_b32 full asam | TIES | average | 75.45 | 76.00 | +0.55 |"
        in paths.summary.read_text()
    )
    assert ["saft 1", "clip_vit_b32 full asam", "TIES", "average", "75.45", "76.00", "+0.55"] in ParsedPage(
        paths.html.read_text()
    ).rows


def test_a_comparison_takes_each_number_from_the_job_that_measured_it(tmp_path) -> None:
    report(tmp_path / "a", make_study(2, 1), published=[LACKING])
    report(tmp_path / "b", make_study(2, 1), published=[MEASURED])
    paths = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert paths.summary.read_text().count("| saft 1 |") == 1
    assert "+0.55" in paths.summary.read_text()
    assert unite([("", [LACKING])]) == ([LACKING], [])


def test_the_mean_over_seeds_stands_beside_a_number_and_ambiguous_runs_are_named() -> None:
    other = replace(MEASURED, ours=70.0)
    (row,), notes = unite([("seed: 0\nlr: 1", [MEASURED]), ("seed: 1\nlr: 1", [other])])
    assert row.ours == pytest.approx(73.0)
    assert "2 seeds" in notes[0]
    rows, notes = unite([("seed: 0\nα: .1", [MEASURED]), ("seed: 0\nα: .2", [other])])
    assert rows == []
    assert "saft 1, clip_vit_b32 full" in notes[0]
    clipped = [
        ("clip: 1", [replace(MEASURED, unprinted="clip=1")]),
        ("clip: 2", [replace(other, unprinted="clip=2")]),
    ]
    assert unite(clipped)[0] == []
    assert unite([("", [LACKING]), *clipped[:1]])[0] == [replace(MEASURED, unprinted="clip=1")]
    assert unite([("a: 1", [MEASURED]), ("a: 2", [MEASURED]), ("a: 3", [LACKING])]) == ([MEASURED], [])


def test_a_comparison_says_what_it_left_out_of_a_table(tmp_path) -> None:
    for coefficient, ours in ((0.1, 76.0), (0.2, 70.0)):
        row = replace(MEASURED, ours=ours)
        config = f"coefficient: {coefficient}\n"
        report(tmp_path / str(coefficient), make_study(2, 1), published=[row], config_yaml=config)
    paths = compare([tmp_path / "0.1", tmp_path / "0.2"], tmp_path / "out")
    assert "| saft 1 |" not in paths.summary.read_text()
    for text in (paths.summary.read_text(), paths.html.read_text()):
        assert "ties average" in text
        assert "Left out" in text


DOUBTFUL = [
    ("mergopt", "9", "ties", "flowers102"),
    ("mergopt", "9", "average", "average"),
    ("mergopt", "5", "dare", "average"),
    ("mergopt_trace", "1", "experts", "numglue_cm"),
    ("mergopt_trace", "2", "ties", "numglue_ds"),
    ("mergopt_trace", "7", "dare", "numglue_cm"),
    ("mergopt_trace", "1", "task_arithmetic", "average"),
    ("mergopt_trace", "1", "average", "fomc"),
    ("mergopt_trace", "8", "ties", "fomc"),
    ("mergopt_trace", "11", "task_arithmetic", "average"),
    ("mergopt_trace", "22", "task_arithmetic", "average"),
    ("epimer", "6", "zero_shot", "cars"),
    ("saft_glue", "C6", "task_arithmetic", "rte"),
    ("saft", "C1", "experts", "average"),
]


def list_undoubted() -> list[tuple[str, ...]]:
    """Numbers of the list above of which nothing is said."""
    undoubted = []
    for source, table, row, column in DOUBTFUL:
        cells = (r for r in read_published(f"{source} {table}") if (r.row, r.column) == (row, column))
        if not find_doubt(source, next(cells)):
            undoubted.append((source, table, row, column))
    return undoubted


def test_a_doubtful_number_says_so_and_one_that_is_not_does_not(monkeypatch) -> None:
    assert list_undoubted() == []
    (sound,) = {find_doubt("mergopt", r) for r in read_published("mergopt 9") if r.column == "cars"}
    assert sound == ""
    normalized = [r for r in read_published("saft_glue C6") if r.column == "normalized"]
    assert {(r.finetuning, r.optimizer) for r in normalized if "65.40" in find_doubt("saft_glue", r)} == {
        ("full", "asam")
    }
    on_fomc = [r for r in read_published("mergopt_trace 14") if r.column == "fomc"]
    assert {r.optimizer for r in on_fomc if find_doubt("mergopt_trace", r) and r.row == "dare"} == {"asam"}
    monkeypatch.setattr(paper_tables, "read_doubts", lambda source: [])
    assert list_undoubted() == DOUBTFUL


def test_the_report_marks_a_doubtful_number_and_tells_of_every_row(tmp_path) -> None:
    doubtful = replace(
        MEASURED, equal="training.steps=8000", unprinted="training.clip_norm=1.0 (the recipe)", note="of k/102"
    )
    paths = report(tmp_path, make_study(2, 1), published=[doubtful, replace(MEASURED, column="normalized")])
    summary, page = paths.summary.read_text(), paths.html.read_text()
    assert "| 75.45 † |" in summary
    assert "| normalized | 75.45 |" in summary
    assert "† Doubtful, saft 1: of k/102." in summary
    assert "printed: training.clip_norm=1.0 (the recipe)" in summary
    for text in ("75.45 †", "<h3>saft 1, clip_vit_b32 full asam: TIES</h3>", "Equal: training.steps=8000",
                 "Not printed, ours: training.clip_norm=1.0 (the recipe)", "Doubtful: of k/102"):  # fmt: skip
        assert text in page
