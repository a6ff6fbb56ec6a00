import json
from dataclasses import asdict, replace

import pytest

from mergekit_lab.errors import InputError
from mergekit_lab.reporting import read_records
from mergekit_lab.reporting.records import deduplicate, write_records, write_text


def test_written_records_are_read_back_equal(tmp_path, study):
    odd = replace(study(1, 1)[0], task='tâche "x"\n', reused=True)
    records = [*study(tasks=2, mergers=2, seeds=2), odd]
    write_records(tmp_path / "deep" / "records.jsonl", records)
    assert read_records(tmp_path / "deep" / "records.jsonl") == records
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["records.jsonl"]


def test_a_failed_write_keeps_the_previous_file_and_leaves_no_temporary_one(tmp_path, monkeypatch):
    write_text(tmp_path / "a.txt", "before")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "a.txt", "after")
    assert (tmp_path / "a.txt").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_normalized_is_value_over_expert_value(record):
    assert record(value=0.6, expert_value=0.8).normalized == pytest.approx(0.75)
    assert record(expert_value=None).normalized is None
    assert record(expert_value=0.0).normalized is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "merge"}, "'merge'.*'merged'"),
        ({"merger": None}, "'merged'.*merger None"),
        ({"model": "a"}, "with model .a."),
        ({"value": 85.3}, "value is 85.3"),
        ({"wall_seconds": -1.0}, "wall_seconds is -1.0"),
    ],
)
def test_impossible_records_are_refused(record, changes, message):
    with pytest.raises(InputError, match=message):
        replace(record(), **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: "{broken", "line 2: Expecting property name"),
        (lambda entry: "[1]", "record is a JSON"),
        (lambda entry: json.dumps({**entry, "sed": 1}), "did you mean 'seed'"),
        (
            lambda entry: json.dumps({k: v for k, v in entry.items() if k != "task"}),
            "line 2: missing fields task",
        ),
        (lambda entry: json.dumps({**entry, "seed": "0"}), "2.*'seed' is '0'"),
        (lambda entry: json.dumps({**entry, "seed": True}), "2.*'seed' is True"),
        (lambda entry: json.dumps({**entry, "coefficient": "a"}), "'coefficient' is 'a'"),
        (lambda entry: json.dumps({**entry, "value": 2}), "2.*'dtd'.*value is 2"),
    ],
)
def test_a_broken_line_is_named_with_file_and_line(tmp_path, record, change, message):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(asdict(record())) + "\n" + change(asdict(record())) + "\n")
    with pytest.raises(InputError, match=message) as caught:
        read_records(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["coefficient", "model_seconds", "wall_seconds", "value", "expert_value"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_no_number_of_a_record_is_infinite_or_none_at_all(record, name, number):
    with pytest.raises(InputError, match=f"record of task 'dtd': {name} is {number}"):
        record(**{name: number})


def test_a_whole_number_is_read_where_a_float_is_meant(tmp_path, record):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({**asdict(record()), "value": 1}))
    assert read_records(path)[0].value == 1


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")


def test_duplicates_keep_the_computed_copy_in_place_of_the_reused_one(record):
    first, other = record(task="a", reused=True, wall_seconds=0.0), record(task="b")
    computed = record(task="a", wall_seconds=9.0)
    assert deduplicate([first, other, computed, first]) == [computed, other]


def test_one_evaluation_listed_under_two_optimizers_stays_in_both(record):
    shared = [record(kind="zero_shot", optimizer=name, evaluation_key="same") for name in ("adamw", "sam")]
    assert deduplicate(shared) == shared


def test_records_of_earlier_versions_lack_what_came_later_and_are_read(tmp_path, record) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [record()])
    entry = json.loads(path.read_text())
    del entry["model_seconds"], entry["model_peak_memory_bytes"]
    path.write_text(json.dumps(entry) + "\n")
    assert read_records(path) == [record()]


def test_records_that_speak_of_splits_are_refused_with_the_way_out(tmp_path, record) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [record()])
    path.write_text(path.read_text().replace('"part"', '"split"'))
    with pytest.raises(InputError, match=r"line 1: .*'split'"):
        read_records(path)
