"""Intervals cover what they should, and a mark says which mergers the best may not beat."""

import numpy as np
import pytest

from mergekit_lab.reporting import RunFiles, read_records, write_report
from mergekit_lab.reporting.bootstrap import add_intervals
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.report import compare


def draw_records(
    record, shares: dict[str, float], size: int = 400, tasks: int = 2, seeds: int = 1, base: int = 0
):
    """Records whose values are means of random zeros and ones, and these."""
    random = np.random.default_rng(base)
    records, samples = [], {}
    for task in range(tasks):
        ease = random.random(size)
        for seed in range(seeds):
            for name, share in shares.items():
                correct = (ease + 0.2 * random.random(size) < share).astype(np.uint8)
                scored = record(
                    merger=name, task=f"task{task}", seed=seed, value=float(correct.mean()), expert_value=1.0
                )
                records.append(scored)
                samples[scored.evaluation_key] = correct
    return records, samples


def test_the_interval_is_that_of_a_mean_of_independent_samples(record) -> None:
    records, samples = draw_records(record, {"a": 0.7, "b": 0.3}, size=2000, tasks=1)
    row = add_intervals(build_table(records), samples).rows[0]
    low, high = row.interval
    p = row.average.mean
    half = 1.96 * (p * (1 - p) / 2000) ** 0.5
    assert (low, high) == pytest.approx((p - half, p + half), abs=0.2 * half)


def test_a_model_that_is_better_on_most_samples_is_told_apart_and_a_near_twin_is_not(record) -> None:
    records, samples = draw_records(record, {"best": 0.80, "twin": 0.799, "worse": 0.55})
    table = add_intervals(build_table(records), samples)
    close = [row.label for row in table.rows if row.close]
    assert close in (["best"], ["twin"])
    assert any(
        "ot distinguishable from the best" in note and note.endswith(f": {close[0]}.") for note in table.notes
    )


def test_comparing_on_the_same_samples_sees_what_intervals_apart_would_not(record) -> None:
    """Two models that differ on few samples, always one way: their intervals overlap."""
    base = np.array([1] * 600 + [0] * 400, dtype=np.uint8)
    better = base.copy()
    better[600:612] = 1
    records = [
        record(merger=name, task="t", value=float(correct.mean()))
        for name, correct in (("a", base), ("b", better))
    ]
    samples = {r.evaluation_key: correct for r, correct in zip(records, (base, better), strict=True)}
    a, b = add_intervals(build_table(records), samples).rows
    assert a.interval[1] > b.interval[0]
    assert not a.close


def test_seeds_that_disagree_widen_the_interval(record) -> None:
    random = np.random.default_rng(3)
    records, samples = [], {}
    for seed, share in enumerate((0.5, 0.9, 0.7)):
        for merger in "ab":
            correct = (random.random(3000) < share).astype(np.uint8)
            scored = record(merger=merger, task="t", seed=seed, value=float(correct.mean()))
            records.append(scored)
            samples[scored.evaluation_key] = correct
    many = add_intervals(build_table(records), samples).rows[0].interval
    one = [r for r in records if r.seed == 0]
    few = add_intervals(build_table(one), samples).rows[0].interval
    assert many[1] - many[0] > 5 * (few[1] - few[0])


def test_without_the_samples_of_every_evaluation_a_row_has_no_interval(record) -> None:
    records, samples = draw_records(record, {"a": 0.7, "b": 0.3})
    del samples[records[0].evaluation_key]
    rows = {row.label: row for row in add_intervals(build_table(records), samples).rows}
    assert rows["a"].interval is None
    assert rows["b"].interval is not None
    assert add_intervals(build_table(records), {}) == build_table(records)


@pytest.mark.parametrize("lacks", ["a seed", "a task of a seed"])
def test_an_odd_row_is_left_out_with_a_note_and_costs_the_others_nothing(record, lacks) -> None:
    records, samples = draw_records(record, {"a": 0.70, "b": 0.699, "odd": 0.5}, seeds=2)
    whole = add_intervals(build_table(records), samples)
    kept = [
        r for r in records
        if not (r.merger == "odd" and r.seed == 1 and (lacks == "a seed" or r.task == "task1"))
    ]  # fmt: skip
    table = add_intervals(build_table(kept), samples)
    rows = {row.label: row for row in table.rows}
    assert [label for label, row in rows.items() if row.interval is None] == ["odd"]
    assert any(row.close for row in table.rows)
    assert rows["a"].interval == pytest.approx(whole.rows[0].interval, abs=0.01)
    assert [note for note in table.notes if note.startswith("odd: no interval, and left out")]
    assert not [note for note in whole.notes if "no interval" in note]


def test_the_same_samples_give_the_same_interval_and_a_comparison_has_them_too(record, tmp_path) -> None:
    records, samples = draw_records(record, {"a": 0.7, "b": 0.69, "c": 0.4})
    first = write_report(RunFiles(tmp_path / "run", records, samples=samples), "x")
    assert first.table == add_intervals(build_table(records), samples)
    assert read_records(first.records) == records
    again = compare([tmp_path / "run"], tmp_path / "out")
    assert again.table.rows == first.table.rows
    text = again.html.read_text()
    assert "average, 95 %" in text
    low, high = first.table.rows[0].interval
    assert f"{100 * low:.1f} to {100 * high:.1f}" in text
    assert text.count("≈</abbr>") == 1


def test_a_damaged_file_of_samples_is_a_failure_of_its_run_alone(record, tmp_path) -> None:
    records, samples = draw_records(record, {"a": 0.7, "b": 0.5})
    for name in ("one", "two"):
        write_report(RunFiles(tmp_path / name, records, samples=samples), "x")
    (tmp_path / "two/samples.npz").write_bytes(b"PK broken")
    comparison = compare([tmp_path / "one", tmp_path / "two"], tmp_path / "out")
    assert comparison.table.rows
    assert "samples.npz cannot be read" in comparison.html.read_text()
