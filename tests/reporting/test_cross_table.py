"""Two dimensions against each other: every number from the records, marks as papers set them."""

import csv
from statistics import mean, stdev

import pytest

from mergekit_lab import InputError
from mergekit_lab.reporting import print_table, write_cross_table
from mergekit_lab.reporting.cross_table import tabulate_across
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.writing import to_csv, to_latex, to_markdown


@pytest.fixture(scope="module")
def records(study):
    return study(tasks=3, mergers=3, optimizers=3, seeds=2)


def test_a_cell_is_the_mean_over_tasks_then_mean_and_deviation_over_seeds(records) -> None:
    table = tabulate_across(records, "optimizer×merger")
    assert table.rows == ("optimizer0", "optimizer1", "optimizer2")
    assert table.columns == ("zero-shot", "experts", "merger0", "merger1", "merger2", "+joint")
    of_seed = [
        mean(
            r.normalized
            for r in records
            if r.label == "merger1" and r.optimizer == "optimizer2" and r.seed == s
        )
        for s in (0, 1)
    ]
    cell = table.cells[2][3]
    assert cell.mean == pytest.approx(mean(of_seed))
    assert cell.sd == pytest.approx(stdev(of_seed))
    assert "mean over tasks and seeds" in table.notes[0]


def test_values_and_tasks_can_be_the_measure_and_the_columns(study) -> None:
    records = study(tasks=3, mergers=2)
    table = tabulate_across(records, "merger*task", "value")
    assert table.columns == ("task0", "task1", "task2")
    (record,) = [r for r in records if r.label == "merger1" and r.task == "task2"]
    cell = table.cells[table.rows.index("merger1")][2]
    assert (cell.mean, cell.sd) == (record.value, None)
    assert (
        tabulate_across(records, "task×merger", "value").cells[2][table.rows.index("merger1")].mean
        == record.value
    )


def test_a_fixed_dimension_leaves_its_records_alone(records) -> None:
    table = tabulate_across(records, "optimizer×task@merger:merger1@seed:1", "value")
    assert (table.rows, table.columns) == (
        ("optimizer0", "optimizer1", "optimizer2"), ("task0", "task1", "task2"),
    )  # fmt: skip
    for row, cells in zip(table.rows, table.cells, strict=True):
        for column, cell in zip(table.columns, cells, strict=True):
            (one,) = [
                r.value for r in records
                if (r.label, r.optimizer, r.task, r.seed) == ("merger1", row, column, 1)
            ]  # fmt: skip
            assert (cell.mean, cell.sd) == (one, None)
    assert "merger merger1, seed 1" in table.notes[0]
    assert tabulate_across(records, "optimizer×task@merger:experts").cells[0][0].text.startswith("100.0")


def test_a_merger_is_fixed_by_its_label_or_by_the_name_that_tables_show(record) -> None:
    records = [record(merger=m, task=t) for m in ("tsvm", "ties") for t in "ab"]
    by_label, by_name = (tabulate_across(records, f"seed×task@merger:{m}") for m in ("tsvm", "TSV-M"))
    assert by_label.cells == by_name.cells


def test_the_best_of_a_column_is_bold_and_the_second_underlined(record) -> None:
    values = {"sgd": 0.8, "adamw": 0.9, "sam": 0.7}
    records = [record(optimizer=name, value=value, expert_value=1.0) for name, value in values.items()]
    table = tabulate_across(records, "optimizer×merger")
    assert [row[0].best for row in table.cells] == [False, True, False]
    assert [row[0].second for row in table.cells] == [True, False, False]
    latex = to_latex(table)
    assert "adamw & \\textbf{90.0}" in latex
    assert "sgd & \\underline{80.0}" in latex
    assert "sam & 70.0" in latex
    assert "| adamw | **90.0** |" in to_markdown(table)


def test_of_two_rows_none_is_second_and_equal_ones_are_not_marked(record) -> None:
    two = [record(optimizer=name, value=v) for name, v in (("a", 0.5), ("b", 0.6))]
    assert not any(cell.second for row in tabulate_across(two, "optimizer×merger").cells for cell in row)
    same = [record(optimizer=name, value=0.5) for name in "ab"]
    assert not any(cell.best for row in tabulate_across(same, "optimizer×merger").cells for cell in row)


def test_a_cell_that_lacks_a_task_is_empty_not_a_mean_of_others(study) -> None:
    records = [
        r for r in study(tasks=2, mergers=2, optimizers=2)
        if not (r.label == "merger0" and r.optimizer == "optimizer1" and r.task == "task1")
    ]  # fmt: skip
    table = tabulate_across(records, "optimizer×merger")
    assert table.cells[1][table.columns.index("merger0")].text == "–"
    assert table.cells[0][table.columns.index("merger0")].mean is not None


def test_csv_holds_fractions_and_deviations(records) -> None:
    table = tabulate_across(records, "merger×optimizer", "value")
    rows = list(csv.reader(to_csv(table).splitlines()))
    assert rows[0] == ["merger × optimizer", *(f"optimizer{i}{end}" for i in range(3) for end in ("", " sd"))]
    assert float(rows[3][1]) == table.cells[2][0].mean
    assert float(rows[3][2]) == table.cells[2][0].sd


@pytest.mark.parametrize(
    ("table", "measure", "match"),
    [
        ("optimizers×merger", "value", "'optimizers'.*optimizer"),
        ("optimizer", "value", "must be two dimensions"),
        ("optimizer×optimizer", "value", "must be two dimensions"),
        ("optimizer×merger", "accuracy", "metric is 'accuracy'"),
        ("merger×task", "value", "leaves optimizer open"),
        ("optimizer×task", "value", "merger.*@merger:VALUE"),
        ("optimizer×task@merger:merger9", "value", "merger 'merger9'"),
        ("optimizer×task@mergr:merger1", "value", "'mergr'.*'merger'"),
        ("optimizer×task@task:task1@merger:merger1", "value", "after @ comes another dimension"),
        ("optimizer×task@merger:merger1@merger:merger2", "value", "after @ comes another dimension"),
        ("optimizer×task@merger", "value", "after @ comes another dimension"),
    ],
)
def test_what_would_mix_or_is_misspelled_is_refused(records, table, measure, match) -> None:
    with pytest.raises(InputError, match=match):
        tabulate_across(records, table, measure)


def test_models_of_one_label_are_told_apart_as_in_the_leaderboard_and_never_averaged(record) -> None:
    by_coefficient = [
        record(coefficient=coefficient, value=value, expert_value=1.0, optimizer=optimizer)
        for optimizer, coefficient, value in (("a", 0.3, 0.8), ("a", 1.0, 0.6), ("b", 0.3, 0.5))
    ]
    table = tabulate_across(by_coefficient, "optimizer×merger")
    assert table.columns == ("ties (α=0.3)", "ties (α=1)")
    assert [[cell.text for cell in row] for row in table.cells] == [["80.0", "60.0"], ["50.0", "–"]]
    by_key = [record(model_key=key * 8, evaluation_key=key) for key in "pq"]
    assert tabulate_across(by_key, "merger×task").rows == ("ties (pppppppp)", "ties (qqqqqqqq)")
    experts = [record(kind="expert", evaluation_key=key) for key in "pq"]
    with pytest.raises(InputError, match="dtd, seed 0, has"):
        tabulate_across(experts, "merger×task")


def test_references_take_no_marks_from_mergers_in_rows(study) -> None:
    table = tabulate_across(study(tasks=2, mergers=3), "merger×task")
    marks = {
        row: ("best" if cells[0].best else "second" if cells[0].second else "")
        for row, cells in zip(table.rows, table.cells, strict=True)
    }
    assert marks == {
        "zero-shot": "", "experts": "", "merger0": "", "merger1": "second", "merger2": "best", "+joint": "",
    }  # fmt: skip


def test_spaces_around_the_sign_mean_nothing(records) -> None:
    assert tabulate_across(records, "optimizer × merger") == tabulate_across(records, "optimizer*merger")


@pytest.mark.parametrize("width", [80, 30])
def test_a_narrow_terminal_shows_every_number_in_tables_below_each_other(study, width: int) -> None:
    from rich.console import Console

    table = tabulate_across(study(tasks=1, mergers=9, optimizers=2), "optimizer×merger")
    console = Console(record=True, width=width)
    print_table(table, console)
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    shown = " ".join(lines)
    assert all(name in shown for name in table.columns)
    assert all(cell.text in shown for row in table.cells for cell in row)
    assert "…" not in shown


def test_names_cannot_break_out_of_latex_or_markdown(record) -> None:
    hostile = r"a_b & 50% {\bf} $x^2$ #1 ~ | <i>"
    table = tabulate_across([record(optimizer=hostile), record(optimizer="x")], "optimizer×merger")
    latex = to_latex(table)
    assert r"a\_b \& 50\% \{\textbackslash{}bf\} \$x\textasciicircum{}2\$ \#1 \textasciitilde{} | <i>" in latex
    assert "&lt;i&gt;" in to_markdown(table)
    assert latex.count("\\\\") == 3


def test_the_leaderboard_in_latex_has_a_line_for_every_row(study) -> None:
    table = build_table(study(tasks=2, mergers=3, optimizers=2))
    latex = to_latex(table)
    assert latex.count("\\\\") == len(table.rows) + 1
    assert latex.count("\\midrule") == 2
    assert all(row.average.text in latex for row in table.rows)
    lines = latex.splitlines()
    assert [line.count("\\textbf{") for line in lines if "merger2" in line] == [4, 4]
    assert [line.count("\\underline{") for line in lines if "merger1" in line] == [4, 4]
    assert latex.count("\\underline{") == latex.count("\\textbf{") == 8


def test_files_and_terminal_show_the_same_numbers(records, tmp_path) -> None:
    from rich.console import Console

    table = write_cross_table(tmp_path, records, "optimizer×merger", "value")
    console = Console(record=True, width=200)
    print_table(table, console)
    printed = console.export_text()
    for row in table.cells:
        for cell in row:
            assert cell.text in printed
            assert cell.text in (tmp_path / "table.md").read_text()
            assert cell.text.replace("±", "$\\pm$") in (tmp_path / "table.tex").read_text()


def test_references_are_never_marked_as_rows_or_columns(record) -> None:
    kinds = {"zero_shot": 0.4, "expert": 0.9, "merged": 0.6, "joint": 0.8}
    records = [
        record(kind=kind, optimizer=optimizer, value=value + shift, expert_value=0.9 + shift)
        for kind, value in kinds.items()
        for optimizer, shift in (("adamw", 0.0), ("sam", 0.05))
    ]
    for measure in ("normalized", "value"):
        table = tabulate_across(records, "optimizer×merger", measure)
        marked = [name for row in table.cells for name, c in zip(table.columns, row, strict=True) if c.best]
        assert marked == ["ties"]
    turned = tabulate_across(records, "merger×optimizer", "value")
    assert not any(cell.best for row in turned.cells for cell in row)  # there is one merger alone


def test_shares_of_experts_of_different_strength_have_the_value_beside_them_and_a_note(record) -> None:
    def make_table(weak: float):
        return tabulate_across(
            [record(value=0.45, expert_value=0.9), record(optimizer="sam", value=0.4, expert_value=weak)],
            "optimizer×merger",
        )

    unequal = make_table(0.5)
    assert [row[0].text for row in unequal.cells] == ["50.0 (45.0)", "80.0 (40.0)"]
    assert "from 50.0 to 90.0" in unequal.notes[1]
    assert "| 50.0 (45.0) |" in to_markdown(unequal)
    assert next(csv.reader(to_csv(unequal).splitlines())) == ["optimizer × merger", "ties", "ties value"]
    assert [row[0].text for row in make_table(0.9).cells] == ["50.0", "44.4"]
    by_task = [record(task=task, value=0.4, expert_value=e) for task, e in (("a", 0.5), ("b", 0.9))]
    assert tabulate_across(by_task, "merger×task").cells[0][0].text == "80.0"  # tasks are not compared
