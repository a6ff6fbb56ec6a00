import base64
import csv
import hashlib
import json
import os
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from mergekit_lab.errors import say_bytes, say_duration
from mergekit_lab.failure import write_failure
from mergekit_lab.reporting import Origin, Timing, compare, read_records, write_report
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.records import Failure, write_records
from mergekit_lab.reporting.run_files import FILES_READ, RunFiles, read_run
from mergekit_lab.reporting.summary import say_cache

CURVES = {"task0": [{"step": 0, "train_loss": 2.0}, {"step": 9, "train_loss": 1.0}]}
SEARCHES = {"merger0": [{"coefficient": 0.1, "normalized": 0.7, "chosen": True}]}
ORIGIN = Origin(("+experiment=a b",), "2026-01-02", {"torch": "2.9"}, "Linux x86_64, 2 cores", ("cpu",))
KINDS = ("pdf", "png", "svg", "vl.json")
EVIL = "<img src=x onerror=alert(1)>\"'&</script>"


def report(folder, records, title="A run", **changes):
    arguments = {
        "curves": CURVES,
        "searches": SEARCHES,
        "config_yaml": "seed: 0\n",
        "origin": ORIGIN,
        "timings": {"finetune": Timing(61.0, computed=1, reused=2)},
    }
    return write_report(RunFiles(folder, records, **{**arguments, **changes}), title)


class ParsedPage(HTMLParser):
    """Elements with their attributes, the text of every table cell, and unbalanced tags."""

    void = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.elements, self.rows, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.void:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and {"td", "th"} & set(self.open) and "unseen" not in str(self.elements[-1]):
            self.rows[-1][-1] += data

    def find_all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def written(tmp_path_factory, study):
    return report(tmp_path_factory.mktemp("run"), study(tasks=2, mergers=2))


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


def test_a_comparison_shows_the_configuration_of_every_run_folded(tmp_path, study):
    for name in ("a", "b"):
        report(tmp_path / name, study(1, 1), config_yaml=f"name: {name}\n", curves={}, searches={})
    assert (tmp_path / "a" / "config.yaml").read_text() == "name: a\n"
    (tmp_path / "b" / "config.yaml").write_text("name: <b>\n")
    page = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "all").html.read_text()
    for name, text in (("a", "a"), ("b", "&lt;b&gt;")):
        summary = f'<summary>Configuration of {name}</summary><pre tabindex="0">name: {text}\n</pre></details>'
        assert f"<details>{summary}" in page


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


def test_no_size_is_said_to_be_nothing():
    assert [say_bytes(size) for size in (0, 99, 4_000, 99_999, 123_456, 2.5e8, 7.1e9)] == [
        "0 bytes", "99 bytes", "4.0 kB", "100.0 kB", "0.12 MB", "0.25 GB", "7.1 GB",
    ]  # fmt: skip


def test_a_count_of_nothing_is_not_said(record):
    assert say_cache([record(peak_memory_bytes=0)] * 2) == "All 2 evaluations were computed."
    assert say_cache([record(reused=True, peak_memory_bytes=None)]).startswith("All 1 evaluations were found")
    assert say_cache([]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_durations(seconds, text):
    assert say_duration(seconds) == text


def test_a_comparison_equals_the_table_of_all_records_and_lists_the_failed(tmp_path, study):
    records = study(tasks=2, mergers=2, seeds=2)
    for seed in range(2):
        report(tmp_path / f"seed{seed}", [r for r in records if r.seed == seed], curves={}, searches={})
    for name in ("crashed", "empty", "broken", "odd"):
        (tmp_path / name).mkdir()
    (tmp_path / "crashed" / "failure.json").write_text(
        json.dumps({"overrides": ["optimizer=sam", "seed=3"], "error": "CUDA out of memory"})
    )
    (tmp_path / "crashed" / "records.jsonl").write_text((tmp_path / "seed0" / "records.jsonl").read_text())
    (tmp_path / "broken" / "records.jsonl").write_text("{\n")
    write_records(tmp_path / "odd" / "records.jsonl", study(1, 1))
    (tmp_path / "odd" / "timings.json").write_text('{"merge": {"hours": 1}}')
    (tmp_path / "nan").mkdir()
    lines = (
        (tmp_path / "seed0" / "records.jsonl")
        .read_text()
        .replace('"model_seconds": null', '"model_seconds": NaN')
    )
    (tmp_path / "nan" / "records.jsonl").write_text(lines)
    dirs = [tmp_path / name for name in ("seed0", "crashed", "empty", "seed1", "broken", "none", "odd", "nan")]
    together = compare(dirs, tmp_path / "all", title="All")

    assert together.table == build_table(records)
    assert read_records(together.records) == records
    text = together.summary.read_text()
    assert f"- {tmp_path / 'crashed'} optimizer=sam seed=3: CUDA out of memory" in text
    assert f"- {tmp_path / 'empty'} : no records.jsonl" in text
    assert "broken/records.jsonl, line 1: Expecting" in text
    assert f"- {tmp_path / 'none'} : no such folder" in text
    assert f"- {tmp_path / 'odd'} : " in text
    assert "nan/records.jsonl, line 1: record" in text
    assert "6 failures: see the list." in text
    assert len(together.failures) == 6
    assert "finetune: 2 min 02 s, 2 computed, 4 reused" in text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("timings.json", '{"merge": {"seconds": "x"}}'),
        ("timings.json", '{"merge": {"seconds": NaN}}'),
        ("timings.json", "[" * 100_000),
        ("origin.json", '{"arguments": []}'),
        ("curves.json", '{"task0": 5}'),
        ("curves.json", '{"task0": [{"train_loss": 1.0}]}'),
        ("curves.json", '{"task0": [{"step": 0, "train_loss": "x"}]}'),
        ("searches.json", '{"merger0": [{"coefficient": 0.1}]}'),
        ("published.json", '[{"source": "a", "table": "b", "setting": "", "row": "r", "column": "c",'
         ' "published": "x", "ours": null}]'),
    ],
)  # fmt: skip
def test_a_run_whose_file_is_damaged_is_a_failure_with_a_reason(tmp_path, written, file, text):
    folder = shutil.copytree(written.records.parent, tmp_path / "odd")
    assert isinstance(read_run(folder), RunFiles)
    (folder / file).write_text(text)
    failure = read_run(folder)
    assert isinstance(failure, Failure)
    assert failure.error


def test_a_failure_with_bytes_that_are_no_text_is_read(tmp_path):
    (tmp_path / "failure.json").write_text(
        json.dumps({"error": "no file a\udcff", "overrides": ["base=a\udcff"]})
    )
    failure = read_run(tmp_path)
    assert isinstance(failure, Failure)
    assert failure.error.startswith("no file a")
    assert len(failure.overrides) == 1


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_no_pipe_and_no_device_in_a_run_s_folder_is_read(make, tmp_path, written):
    for name in FILES_READ:
        folder = shutil.copytree(written.records.parent, tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        failure = read_run(folder)
        assert isinstance(failure, Failure)
        assert f"{name} is a pipe or a device, not a file" in failure.error


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


def test_what_a_terminal_would_obey_comes_from_no_run_s_folder(tmp_path, written):
    folder = shutil.copytree(written.records.parent, tmp_path / "odd")
    text = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(text.replace('"task0"', '"\\u001b[2J"'))
    failure = read_run(folder)
    assert isinstance(failure, Failure)
    assert r"field 'task' is '\x1b[2J'" in failure.error
    recorded = {"error": "\x1b]0;title\x07 lost\n\tline", "overrides": ["a=\x9b2J"]}
    (folder / "failure.json").write_text(json.dumps(recorded))
    assert read_run(folder) == Failure(str(folder), "]0;title lost\n\tline", ("a=2J",))


def test_no_flipped_bit_of_the_samples_stops_a_comparison(tmp_path, study):
    records = study(tasks=1, mergers=1)
    samples = {record.evaluation_key: np.arange(40) % 7 < 3 for record in records}
    report(tmp_path, records, samples=samples)
    file = tmp_path / "samples.npz"
    sound = file.read_bytes()
    types = set()
    for position in range(len(sound)):
        file.write_bytes(sound[:position] + bytes([sound[position] ^ 64]) + sound[position + 1 :])
        types.add(type(read_run(tmp_path)))
    assert types == {RunFiles, Failure}


def test_a_comparison_draws_the_curves_of_each_group_once(tmp_path, study):
    records = study(tasks=1, mergers=2, optimizers=2)
    for number, record in enumerate(r for r in records if r.kind == "merged"):
        report(tmp_path / str(number), [record], searches={record.merger: SEARCHES["merger0"]})
    names = [path.name for path in compare([tmp_path / str(n) for n in range(4)], tmp_path / "all").figures]
    assert [name for name in names if name.startswith("training")] == [
        "training-1-optimizer0.png",
        "training-2-optimizer1.png",
    ]


def test_a_comparison_of_failures_only_is_written(tmp_path):
    paths = compare([tmp_path / "a"], tmp_path / "all")
    assert "1 failure: see the list." in paths.summary.read_text()
    assert "no such folder" in paths.html.read_text()
