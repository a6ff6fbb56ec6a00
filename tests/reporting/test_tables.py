import csv
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from mergekit_lab.reporting import print_table
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.tables import Cell
from mergekit_lab.reporting.writing import to_csv, to_latex, to_markdown


def make_small_table(record, **changes):
    """Two tasks, experts .8 and .5; ties is better on dtd and in the mean, average on svhn."""
    values = {
        "zero_shot": (0.4, 0.2),
        "expert": (0.8, 0.5),
        "ties": (0.6, 0.3),
        "average": (0.5, 0.35),
        "joint": (0.8, 0.4),
    }
    records = []
    for name, pair in values.items():
        for task, value, expert, zero_shot in zip(("dtd", "svhn"), pair, (0.8, 0.5), (0.4, 0.2), strict=True):
            kind = name if name in ("zero_shot", "expert", "joint") else "merged"
            records.append(
                record(
                    kind=kind,
                    merger=name,
                    task=task,
                    value=value,
                    expert_value=expert,
                    zero_shot_value=zero_shot,
                    **changes,
                )
            )
    return records


def find_row(table, label, *group):
    return next(row for row in table.rows if row.label == label and row.group == group)


def test_markdown_of_a_small_study(record):
    table = build_table(make_small_table(record))
    assert (
        to_markdown(table)
        == """\
| model | dtd | svhn | average | normalized | coefficient |
| --- | ---: | ---: | ---: | ---: | ---: |
| zero-shot | 40.0 | 20.0 | 30.0 | 45.0 | – |
| experts | 80.0 | 50.0 | 65.0 | 100.0 | – |
| TIES | **60.0** | 30.0 | **45.0** | **67.5** | 0.3 |
| Weight average | 50.0 | **35.0** | 42.5 | 66.2 | 0.3 |
| +joint | 80.0 | 40.0 | 60.0 | 90.0 | – |

- Percent on the test part.
- Normalized: the mean over tasks of value ÷ the task's expert on the same part.
- +joint is trained on all tasks at once: the upper reference.
- Bold: the best merger of its group in that column.
"""
    )


def test_normalized_accuracy_is_the_mean_of_ratios_not_the_ratio_of_means(record):
    ties = find_row(build_table(make_small_table(record)), "ties")
    assert ties.normalized.mean == pytest.approx((0.6 / 0.8 + 0.3 / 0.5) / 2)
    assert ties.normalized.mean != pytest.approx((0.6 + 0.3) / (0.8 + 0.5))


def test_seeds_give_mean_and_sample_standard_deviation(record):
    by_seed = {0: (0.6, 0.2), 1: (0.62, 0.3), 2: (0.7, 0.4)}
    table = build_table(
        record(task=task, value=value, expert_value=1.0, seed=seed, coefficient=0.1 * (seed + 1))
        for seed, pair in by_seed.items()
        for task, value in zip(("a", "b"), pair, strict=True)
    )
    row = find_row(table, "ties")
    assert row.cells[0].mean == pytest.approx(0.64)
    assert row.cells[0].sd == pytest.approx((0.0016 + 0.0004 + 0.0036) ** 0.5 / 2**0.5)
    assert row.average.mean == pytest.approx(0.47)
    assert row.average.sd == pytest.approx((0.07**2 + 0.01**2 + 0.08**2) ** 0.5 / 2**0.5)
    assert row.cells[0].text == "64.0 ± 5.3"
    assert row.coefficient == "0.1–0.3"
    assert "over seeds 0, 1, 2" in table.notes[0]


def test_a_missing_task_shows_a_dash_and_takes_the_mean_with_it(record):
    records = [r for r in make_small_table(record) if (r.label, r.task) != ("average", "svhn")]
    average = find_row(build_table(records), "average")
    assert [cell.text for cell in average.cells] == ["50.0", "–", "–", "–"]
    assert average.cells[0].best is False


def test_a_seed_that_lacks_a_task_is_left_out_of_the_mean_only(record):
    records = [
        record(task=task, value=value, seed=seed)
        for task, seed, value in (("a", 0, 0.2), ("b", 0, 0.4), ("a", 1, 0.8))
    ]
    row = find_row(build_table(records), "ties")
    assert row.cells[0].mean == pytest.approx(0.5)
    assert row.average == Cell(pytest.approx(0.3), None)


def test_a_row_with_fewer_seeds_than_the_table_is_named(record):
    records = [
        *make_small_table(record, seed=0),
        *(r for r in make_small_table(record, seed=1) if r.label != "average"),
    ]
    assert "Weight average has only seeds 0." in build_table(records).notes


def test_axes_with_several_values_group_the_rows_and_others_are_hidden(record):
    table = build_table(
        [*make_small_table(record, optimizer="adamw"), *make_small_table(record, optimizer="sam")]
    )
    assert table.axes == ("optimizer",)
    assert table.groups == (("adamw",), ("sam",))
    assert table.make_sheet().names == ("optimizer", "model")
    assert [row.label for row in table.rows] == ["zero-shot", "experts", "ties", "average", "+joint"] * 2


def test_the_best_merger_is_marked_in_each_group_by_itself(record):
    weak = [replace(r, optimizer="sam", value=r.value / 2) for r in make_small_table(record)]
    table = build_table([*make_small_table(record), *weak])
    assert find_row(table, "ties", "adamw").average.best
    assert find_row(table, "ties", "sam").average.best
    assert not any(cell.best for row in table.rows if row.kind != "merged" for cell in row.cells)


def test_mergers_equal_at_the_shown_precision_are_both_best_and_a_lone_one_is_not(record):
    pair = [record(merger="a", value=0.5001), record(merger="b", value=0.5004)]
    assert all(row.average.best for row in build_table(pair).rows)
    assert not build_table(pair[:1]).rows[0].average.best


def test_a_group_is_averaged_over_its_own_tasks(record):
    table = build_table(
        record(suite=suite, task=task, value=value)
        for suite, task, value in (("one", "a", 0.2), ("two", "a", 0.4), ("two", "b", 0.6))
    )
    assert find_row(table, "ties", "one").average.mean == pytest.approx(0.2)
    assert find_row(table, "ties", "two").average.mean == pytest.approx(0.5)


def test_runs_of_one_merger_are_told_apart_and_never_averaged(record):
    by_coefficient = build_table(
        record(coefficient=c, value=c, seed=seed) for c in (0.3, 0.5) for seed in (0, 1)
    )
    assert [row.label for row in by_coefficient.rows] == ["ties (α=0.3)", "ties (α=0.5)"]
    by_key = build_table(
        record(model_key=key, evaluation_key=key, value=value)
        for key, value in (("abcdefgh1", 0.2), ("12345678x", 0.3))
    )
    assert [(row.label, row.average.mean) for row in by_key.rows] == [
        ("ties (abcdefgh)", 0.2),
        ("ties (12345678)", 0.3),
    ]


def test_different_evaluations_of_one_expert_are_reported_not_averaged(record):
    table = build_table(record(kind="expert", value=value, evaluation_key=str(value)) for value in (0.8, 0.6))
    assert table.rows[0].average.text == "80.0"
    assert "experts, dtd, seed 0: several evaluations" in table.notes[-1]


def test_the_test_part_is_shown_unless_there_is_none(record):
    records = [record(part="validation", value=0.1), record(part="test", value=0.2)]
    assert build_table(records).rows[0].average.text == "20.0"
    assert build_table(records[:1]).part == "validation"


def test_the_first_metric_of_a_task_counts_and_the_others_are_named(record):
    table = build_table(
        [
            record(task="cstance", metric="strict", value=0.2),
            record(task="cstance", metric="lenient", value=0.6),
            record(task="meetingbank", metric="rouge_l", value=0.4),
        ]
    )
    assert table.rows[0].average.mean == pytest.approx(0.3)
    assert any("cstance strict, meetingbank rouge_l" in note for note in table.notes)


def test_markdown_keeps_a_hostile_name_inside_its_cell(record):
    text = to_markdown(build_table([record(merger="a|b<script>\nc")]))
    assert "| a\\|b&lt;script&gt; c |" in text


def print_to_text(table, width):
    console = Console(file=StringIO(), width=width)
    print_table(table, console)
    return console.file.getvalue()


def test_printing_shows_every_value_and_takes_no_markup_from_names(record):
    text = print_to_text(
        build_table(make_small_table(record, optimizer="[red]adamw") + make_small_table(record)), width=120
    )
    assert "[red]adamw" in text
    for value in ("60.0", "30.0", "45.0", "67.5", "66.2", "0.3", "+joint"):
        assert value in text


def test_a_narrow_terminal_gets_every_task_in_tables_below_each_other_the_means_first(study):
    table = build_table(study(tasks=20, mergers=2, seeds=2))
    whole = print_to_text(table, width=400)
    assert whole.index("task0") < whole.index("average") < whole.index("coefficient")
    narrow = print_to_text(table, width=80)
    assert all(len(line) <= 80 for line in narrow.splitlines()[: -len(table.notes)])
    assert narrow.index("average") < narrow.index("task0") < narrow.index("task19")
    assert narrow.count("coefficient") == 1
    assert all(cell.text in narrow for row in table.rows for cell in row.cells)
    assert "…" not in narrow


def test_flat_rows_hold_numbers_under_the_headers_names(record):
    rows = build_table(make_small_table(record)).as_rows()
    assert rows[2]["model"] == "ties"
    assert rows[2]["average"] == pytest.approx(0.45)
    assert rows[2]["average sd"] is None


def test_where_experts_of_groups_differ_in_strength_a_note_says_that_shares_flatter_the_weak(record):
    strong, weak = (
        make_small_table(record),
        [replace(r, optimizer="sam", value=r.value / 2) for r in make_small_table(record)],
    )
    (note,) = [note for note in build_table([*strong, *weak]).notes if "differ in strength" in note]
    assert "from 32.5 to 65.0" in note
    same = [replace(r, optimizer="sam") for r in strong]
    assert not [note for note in build_table([*strong, *same]).notes if "differ in strength" in note]


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("ties", "TIES"),
        ("tsvm (α=0.3)", "TSV-M (α=0.3)"),
        ("task_arithmetic", "Task arithmetic"),
        ("mine", "mine"),
    ],
)
def test_a_reader_sees_the_names_of_methods_and_files_of_numbers_keep_the_labels(record, label, name):
    table = build_table([record(merger=label)])
    assert f"| {name} |" in to_markdown(table)
    assert name.split()[0] in print_to_text(table, 200)
    assert label in to_csv(table)
    assert table.mergers == (label,)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_spreadsheet_takes_no_name_for_a_formula_and_numbers_stay_numbers(record, start):
    hostile = f"{start}HYPERLINK(1)"
    table = build_table([record(merger=hostile, task=hostile, coefficient=-0.5, value=-0.25)])
    header, row = csv.reader(StringIO(to_csv(table), newline=""))
    assert header[:2] == ["model", f"'{hostile}"]
    assert row == [f"'{hostile}", "-0.25", "-0.25", "-0.3125", "-0.5"]
    assert next(csv.reader(StringIO(to_csv(build_table([record(kind="joint")])))))[0] == "model"
    assert "'+joint" in to_csv(build_table([record(kind="joint")]))


def test_a_model_made_with_test_inputs_is_marked_wherever_the_table_is_written(record) -> None:
    plain = [record(merger="ties"), record(merger="tsvm")]
    read = replace(record(merger="adamerging"), reads_test_inputs=True)
    assert "test inputs" not in to_markdown(build_table(plain))
    table = build_table([*plain, read])
    for text in (to_markdown(table), to_csv(table), to_latex(table)):
        marked = [line for line in text.splitlines() if "test inputs" in line and "learned" not in line]
        (line,) = marked
        assert "adamerging" in line.lower()
    assert any(note.startswith("Reads test inputs") for note in table.notes)


def test_checkpoints_are_rows_of_their_own_and_compete_where_nothing_was_merged(record) -> None:
    values = {"math": {"dtd": 0.8, "svhn": 0.2}, "code": {"dtd": 0.4, "svhn": 0.5}}
    records = [
        record(
            kind="checkpoint", model=name, model_key=name, evaluation_key=name + task, task=task, value=value
        )
        for name, of_task in values.items()
        for task, value in of_task.items()
    ]
    alone = build_table(records)
    assert {row.label: [cell.best for cell in row.cells[:2]] for row in alone.rows} == {
        "math": [True, False],
        "code": [False, True],
    }
    assert any("best checkpoint" in note for note in alone.notes)
    assert not any("differ in strength" in note for note in alone.notes)
    beside = build_table([*records, *(r for r in make_small_table(record) if r.kind == "merged")])
    assert [row.kind for row in beside.rows] == ["checkpoint", "checkpoint", "merged", "merged"]
    assert not any(cell.best for row in beside.rows[:2] for cell in row.cells)
    assert any("÷ the best checkpoint" in note for note in beside.notes)
