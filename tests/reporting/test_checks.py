"""Results that look like a mistake are named: in the log, on the page and in the summary."""

import pytest
from reporting.conftest import make_record, make_study
from reporting.pages import report

from mergekit_lab.reporting import compare
from mergekit_lab.reporting.checks import find_warnings


def make_expert(task: str, value: float = 0.8, zero_shot: float = 0.4, **changes):
    return make_record(
        kind="expert", task=task, value=value, expert_value=value, zero_shot_value=zero_shot, **changes
    )


def test_what_is_as_expected_is_no_warning() -> None:
    assert find_warnings(make_study(tasks=3, mergers=3, optimizers=2, seeds=2)) == []
    one = [make_expert("a", weights="h"), make_expert("a", weights="h", seed=1), make_expert("b", weights="i")]
    assert find_warnings(one) == []
    assert find_warnings([make_record(zero_shot_value=None, expert_value=None)]) == []


def test_an_expert_below_the_base_on_its_own_task_is_named() -> None:
    (warning,) = find_warnings([make_expert("dtd", 0.31, 0.44), make_expert("svhn", 0.5, 0.5)])
    assert "expert of dtd" in warning
    assert "31.0" in warning
    assert "44.0" in warning
    both = [make_expert("dtd", 0.31, 0.44, optimizer="sam"), make_expert("dtd", optimizer="adamw")]
    assert "optimizer sam" in find_warnings(both)[0]


def test_two_tasks_whose_experts_are_one_file_are_named() -> None:
    records = [
        make_expert("dtd", weights="h"),
        make_expert("svhn", weights="h"),
        make_expert("mnist", weights="i"),
    ]
    (warning,) = find_warnings(records)
    assert "dtd and svhn" in warning
    assert "the same file" in warning
    by_key = [make_expert("dtd", model_key="k"), make_expert("svhn", model_key="k")]
    assert "dtd and svhn" in find_warnings(by_key)[0]
    seeds = [make_expert("dtd", weights="h"), make_expert("svhn", weights="h", seed=1)]
    assert find_warnings(seeds) == []


@pytest.mark.parametrize(("value", "named"), [(0.6, False), (0.61, True)])
def test_a_share_above_150_percent_is_named(value: float, named: bool) -> None:
    warnings = find_warnings([make_record(merger="ties", task="dtd", value=value, expert_value=0.4)])
    assert len(warnings) == named
    assert all("TIES" in warning and "dtd" in warning for warning in warnings)


def test_warnings_are_in_log_page_and_summary_of_a_run_and_of_a_comparison(tmp_path, caplog) -> None:
    records = [make_expert("<dtd>", 0.31, 0.44)]
    for write in (
        lambda: report(tmp_path / "run", records),
        lambda: compare([tmp_path / "run"], tmp_path / "all"),
    ):
        paths = write()
        assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == find_warnings(records)
        caplog.clear()
        assert "## Warnings" in paths.summary.read_text()
        page = paths.html.read_text()
        assert "<h2>Warnings</h2>" in page
        assert "The expert of &lt;dtd&gt" in page
