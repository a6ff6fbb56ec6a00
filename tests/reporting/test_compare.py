"""Runs read back from their folders and set beside each other; what is damaged is listed as a failure."""

import json
import os
import shutil

import numpy as np
import pytest
from reporting.pages import SEARCHES, report

from mergekit_lab.reporting import compare, read_records
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.records import Failure, write_records
from mergekit_lab.reporting.run_files import FILES_READ, RunFiles, read_run


def test_a_comparison_shows_the_configuration_of_every_run_folded(tmp_path, study):
    for name in ("a", "b"):
        report(tmp_path / name, study(1, 1), config_yaml=f"name: {name}\n", curves={}, searches={})
    assert (tmp_path / "a" / "config.yaml").read_text() == "name: a\n"
    (tmp_path / "b" / "config.yaml").write_text("name: <b>\n")
    page = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "all").html.read_text()
    for name, text in (("a", "a"), ("b", "&lt;b&gt;")):
        summary = f'<summary>Configuration of {name}</summary><pre tabindex="0">name: {text}\n</pre></details>'
        assert f"<details>{summary}" in page


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
