import base64
import csv
import hashlib
import json
import re
import shutil

import pytest
from reporting.pages import CURVES, ORIGIN, SEARCHES, ParsedPage, report

from mergekit_lab.failure import write_failure
from mergekit_lab.reporting import Origin, Timing, compare, read_records
from mergekit_lab.reporting.summary import say_cache

KINDS = ("pdf", "png", "svg", "vl.json")
EVIL = "<img src=x onerror=alert(1)>\"'&</script>"


def test_a_run_folder_holds_the_views_and_what_they_are_drawn_from(written, study):
    folder = written.html.parent
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "config.yaml",
        "curves.json",
        *(
            f"figures/{name}.{extension}"
            for name in ("coefficients", "heatmap", "mergers", "shares", "training")
            for extension in KINDS
        ),
        "leaderboard.csv",
        "leaderboard.tex",
        "origin.json",
        "published.json",
        "records.jsonl",
        "report.html",
        "searches.json",
        "summary.md",
        "timings.json",
    ]
    assert read_records(written.records) == study(tasks=2, mergers=2)
    assert json.loads((folder / "timings.json").read_text()) == {
        "finetune": {"seconds": 61.0, "computed": 1, "reused": 2}
    }


def test_the_leaderboard_of_a_run_and_of_a_comparison_is_written_as_fractions(tmp_path, record):
    report(tmp_path / "run", [record(value=0.6, expert_value=0.8)])
    compare([tmp_path / "run"], tmp_path / "all")
    for folder in ("run", "all"):
        with (tmp_path / folder / "leaderboard.csv").open(newline="") as file:
            (row,) = csv.DictReader(file)
        assert (row["model"], row["dtd"], row["coefficient"]) == ("ties", "0.6", "0.3")
        assert float(row["normalized"]) == pytest.approx(0.75)


def test_the_summary_names_the_study_its_best_merger_and_the_references(written):
    text = written.summary.read_text()
    assert "(task0, task1) on ViT-B-32" in text
    best = next(row for row in written.table.rows if row.label == "merger1")
    assert f"The best, merger1, reaches {best.normalized.text} % of its experts' accuracy" in text
    assert "finetune: 1 min 01 s, 1 computed, 2 reused" in text


def test_the_page_is_one_file_that_asks_for_nothing(written):
    page = ParsedPage(text := written.html.read_text())
    assert not page.open
    sources = [value for _, attributes in page.elements for name, value in attributes.items()
               if name in ("src", "href", "action", "style") or name.startswith("on")]  # fmt: skip
    assert all(re.match(r"data:(image/svg\+xml|text/plain);base64,", source) for source in sources)
    assert not page.find_all("link")
    assert len(text) < 5_000_000


def test_the_policy_names_the_style_and_the_scripts_of_the_page_and_allows_nothing_else(written):
    text = written.html.read_text()
    policy = ParsedPage(text).find_all("meta")[2]["content"]
    held = re.findall("<style>(.*?)</style>|<script>(.*?)</script>", text, re.S)
    digests = [hashlib.sha256("".join(each).encode()).digest() for each in held]
    assert re.findall("'sha256-(.*?)'", policy) == [base64.b64encode(digest).decode() for digest in digests]
    assert len(held) == 1 + 2 + 3, "the style, two scripts, three files of the library"
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_figures_beyond_the_pages_room_are_named(tmp_path, study, monkeypatch):
    monkeypatch.setattr("mergekit_lab.reporting.page.FIGURE_BYTES", 0)
    text = report(tmp_path, study(tasks=1, mergers=1), curves={}, searches={}).html.read_text()
    assert "their folders: mergers.png, heatmap.png" in text
    assert "vegaEmbed" not in text


def test_the_table_can_be_downloaded_from_the_page(written):
    links = ParsedPage(written.html.read_text()).find_all("a")
    for link in links:
        content = base64.b64decode(link["href"].split(",")[1])
        assert content == (written.html.parent / link["download"]).read_bytes()
    assert [link["download"] for link in links] == ["leaderboard.csv", "leaderboard.tex"]


def test_the_page_embeds_every_figure_with_a_text_for_it(written):
    images = ParsedPage(written.html.read_text()).find_all("img")
    embedded = [base64.b64decode(image["src"].split(",")[1]) for image in images]
    assert embedded == [path.with_suffix(".svg").read_bytes() for path in written.figures]
    assert all(image["alt"] for image in images)


def test_the_pages_table_holds_the_values_of_the_table_with_the_means_first(written):
    rows = ParsedPage(written.html.read_text()).rows
    assert rows[0] == ["model", "average", "normalized", "coefficient", "task0", "task1", "command"]
    for (*shown, command), row in zip(rows[1:], written.table.rows, strict=False):
        assert "python -m mergekit_lab '+experiment=a b' " in command
        assert shown == [
            row.label,
            row.average.text,
            row.normalized.text,
            row.coefficient,
            *(cell.text for cell in row.cells[:2]),
        ]


def test_headings_are_buttons_that_tell_their_order_and_cells_carry_the_number(written):
    page = ParsedPage(written.html.read_text())
    headings = [button for button in page.find_all("button") if not button.get("class")]
    assert len(headings) == len(written.table.columns) + 2 + 1, "and one that closes a figure"
    assert [th["aria-sort"] for th in page.find_all("th") if "aria-sort" in th] == ["none"] * 6
    sortable = [td["data-value"] for td in page.find_all("td") if "data-value" in td]
    assert float(sortable[0]) == written.table.rows[0].average.mean


def test_no_name_error_or_configuration_reaches_the_page_as_markup(tmp_path, record):
    names = dict.fromkeys(("backbone", "suite", "finetuning", "task", "merger"), EVIL)
    report(
        tmp_path / "run",
        [record(**names, optimizer=EVIL), record(**names, optimizer="sam")],
        config_yaml=EVIL,
        timings={EVIL: Timing(1.0)},
        curves={EVIL: CURVES["task0"]},
        searches={EVIL: SEARCHES["merger0"]},
    )
    write_failure(tmp_path / "failed", [EVIL], EVIL)
    paths = compare([tmp_path / "run", tmp_path / "failed"], tmp_path / "all", title=EVIL)
    text = paths.html.read_text()
    page = ParsedPage(text)
    assert len(page.find_all("script")) == text.count("</script>") == 5 + len(paths.figures)
    assert all("onerror" not in attributes for _, attributes in page.elements)
    assert len(page.find_all("img")) == len(paths.figures)
    assert page.rows[1][1] == EVIL
    assert "<img" not in paths.summary.read_text()


def test_failures_and_configuration_are_on_the_page(tmp_path, study):
    text = report(tmp_path / "run", study(1, 1), config_yaml="optimizer: sam").html.read_text()
    assert '<summary>Configuration</summary><pre tabindex="0">optimizer: sam</pre>' in text
    write_failure(tmp_path / "failed", ["optimizer=sam"], "out of memory\nat step 9")
    text = compare([tmp_path / "run", tmp_path / "failed"], tmp_path / "all").html.read_text()
    assert '<pre tabindex="0">out of memory\nat step 9</pre>' in text
    assert "<code>optimizer=sam</code>" in text


def test_figures_of_analyses_in_the_runs_folder_are_on_the_page_and_every_hash(tmp_path, study):
    for folder in ("a", "b"):
        (tmp_path / folder / "analysis").mkdir(parents=True)
        (tmp_path / folder / "analysis" / "landscape.png").write_bytes(b"a picture")
        one = report(tmp_path / folder, study(1, 1)).html.read_text()
        assert "numbers are in analysis/landscape.json." in one
    records = read_records(tmp_path / "a" / "records.jsonl")
    assert all(f"model {r.model_key}".replace("'", "&#39;") in one for r in records)
    both = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "both").html.read_text()
    assert "Analysis landscape of a;" in both
    assert "Analysis landscape of b;" in both


def test_a_report_of_nothing_is_still_written(tmp_path):
    paths = report(tmp_path, [], curves={}, searches={}, timings={}, config_yaml="")
    assert paths.figures == ()
    assert "No evaluation was recorded." in paths.html.read_text()


def test_a_second_report_leaves_no_figure_of_the_first_and_spares_foreign_ones(tmp_path, study):
    report(tmp_path, study(1, 1, optimizers=2))
    (tmp_path / "figures" / "landscape.png").write_bytes(b"")
    report(tmp_path, study(1, 1), searches={})
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        *(f"heatmap.{extension}" for extension in KINDS),
        "landscape.png",
        *(f"{name}.{extension}" for name in ("mergers", "training") for extension in KINDS),
    ]


def test_the_cache_sentence_counts_what_was_reused(record):
    sentence = say_cache([record(reused=True, wall_seconds=90.0), record(task="b"), record(task="c")])
    assert sentence == (
        "1 of 3 evaluations were found in the store; computing them had taken 1 min 30 s. "
        "The largest memory peak was 1.1 GB."
    )


def test_a_count_of_nothing_is_not_said(record):
    assert say_cache([record(peak_memory_bytes=0)] * 2) == "All 2 evaluations were computed."
    assert say_cache([record(reused=True, peak_memory_bytes=None)]).startswith("All 1 evaluations were found")
    assert say_cache([]) == ""


def test_the_page_says_how_it_was_made_and_a_comparison_how_each_run_was(tmp_path, written, study):
    text, summary = written.html.read_text(), written.summary.read_text()
    for part in (ORIGIN.command.replace("'", "&#39;"), "2026-01-02", "torch 2.9", "Linux x86_64, 2 cores"):
        assert part in text
    assert "```\npython -m mergekit_lab '+experiment=a b'\n```" in summary
    report(tmp_path / "a", study(1, 1), origin=None)
    shutil.copytree(written.records.parent, tmp_path / "b")
    own = Origin(("stage=report",), "")
    both = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "all", origin=own).html
    assert "python -m mergekit_lab stage=report" in both.read_text()
    assert re.findall("<summary>How (.*?) was made", both.read_text()) == ["b"]
