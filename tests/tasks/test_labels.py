"""A source's labels as the task's: by name, by number, over all parts, and refused where they cannot be."""

from pathlib import Path

import pytest
from hub_repos import encode_picture, make_pictures, make_published, write_folders, write_parquet

from mergekit_lab import InputError
from mergekit_lab.tasks import check_task

PART = "{}-00000-of-00001.parquet"


def write_named(folder: Path, layout: str, names: list[str], lacking: dict[str, int]) -> None:
    """Two pictures a class; each part lacks the class of a number."""
    for seed, part in enumerate(("train", "test")):
        kept = [
            (picture, label) for picture, label in make_pictures(2 * len(names), len(names), seed)
            if label != lacking.get(part)
        ]  # fmt: skip
        if layout == "folders":
            write_folders(folder / part, kept, names)
        else:
            write_parquet(folder / PART.format(part), [(picture, names[label]) for picture, label in kept])


@pytest.mark.parametrize("layout", ["folders", "names"])
@pytest.mark.parametrize("ours", [True, False], ids=["our names", "other names"])
def test_a_part_that_lacks_a_class_keeps_the_labels_of_the_others(layout, ours, tmp_path) -> None:
    classes = make_published("eurosat", tmp_path).classes
    names = [name if ours else f"{number} {name}" for number, name in enumerate(classes)]
    write_named(tmp_path, layout, names, {"train": 7, "test": 3})
    task = make_published("eurosat", tmp_path)
    assert sorted(task.load_samples("test").labels.tolist()) == sorted(2 * [0, 1, 2, 4, 5, 6, 7, 8, 9])
    assert set(task.load_samples("train").labels.tolist()) == {0, 1, 2, 3, 4, 5, 6, 8, 9}
    assert not check_task(task).wrong


@pytest.mark.parametrize("layout", ["folders", "names", "header"])
def test_numbers_as_names_are_ordered_by_value(layout: str, tmp_path: Path) -> None:
    names = [str(number) for number in range(43)]
    if layout == "header":
        text = sorted(names)  # as a loader of image folders writes them
        rows = [(encode_picture(number), text.index(str(number))) for number in range(43)]
        for part in ("train", "test"):
            write_parquet(tmp_path / PART.format(part), rows, names=text)
    else:
        write_named(tmp_path, layout, names, {"test": 42})
    task = make_published("gtsrb", tmp_path)
    labels, _, chosen = task.list_labels("test")
    if layout == "folders":
        shown = [int(task.rows["test"].name(row).split("/")[1]) for row in chosen]
    else:
        shown = [row % 43 if layout == "header" else row % 42 for row in chosen]
    assert labels.tolist() == shown
    assert not check_task(task).other_labels


@pytest.mark.parametrize("layout", ["folders", "names"])
def test_names_that_cannot_be_put_in_order_are_refused(layout: str, tmp_path: Path) -> None:
    names = [f"{number} land" for number in range(9)]
    write_named(tmp_path, layout, names, {})
    with pytest.raises(InputError, match=r"names 9 classes.*10 class.*\(0.*1 land"):
        make_published("eurosat", tmp_path).load_samples("train")
    assert "names 9 classes" in check_task(make_published("eurosat", tmp_path)).wrong[0]


def test_names_in_order_of_which_one_is_ours_elsewhere_are_refused(tmp_path: Path) -> None:
    write_named(tmp_path, "folders", ["River", *(f"{number} land" for number in range(9))], {})
    with pytest.raises(InputError, match="names 10 classes"):
        make_published("eurosat", tmp_path).load_samples("train")


def test_the_check_compares_the_names_of_every_part_and_fails_for_one_that_is_ours_elsewhere(tmp_path) -> None:
    names = [f"land {letter}" for letter in "abcdefghij"]
    write_parquet(tmp_path / PART.format("train"), make_pictures(20, 10))
    write_parquet(
        tmp_path / PART.format("test"), make_pictures(10, 10, 1), names=[*names[:3], "River", *names[4:]]
    )
    check = check_task(make_published("eurosat", tmp_path))
    assert "0: land a ↔ annual crop land" in check.other_labels
    assert check.wrong == ["eurosat: names of classes have other classes' numbers (3: River ↔ highway or road)"]


def test_parts_that_number_the_same_names_otherwise_are_refused(tmp_path: Path) -> None:
    names = [f"land {letter}" for letter in "abcdefghij"]
    write_parquet(tmp_path / PART.format("train"), make_pictures(20, 10), names=names)
    write_parquet(tmp_path / PART.format("test"), make_pictures(10, 10, 1), names=names[::-1])
    with pytest.raises(InputError, match="different numbers"):
        make_published("eurosat", tmp_path).load_samples("train")


def test_labels_below_0_are_refused_and_reported(tmp_path: Path) -> None:
    names = list(make_published("eurosat", tmp_path).classes)
    write_parquet(tmp_path / PART.format("train"), make_pictures(20, 10), names=names)
    unlabeled = [(picture, -1) for picture, _ in make_pictures(6, 10, 1)]
    write_parquet(tmp_path / PART.format("test"), unlabeled, names=names)
    with pytest.raises(InputError, match=r"6 of 6 labels.*'test'.*below 0"):
        make_published("eurosat", tmp_path).load_samples("test")
    check = check_task(make_published("eurosat", tmp_path))
    assert "6 labels of 'test'" in check.wrong[0]


@pytest.mark.parametrize(("label", "label_text"), [(None, "label None"), (1.5, "label 1.5")])
def test_labels_that_are_none_name_their_row(label: object, label_text: str, tmp_path: Path) -> None:
    rows = [(picture, float(number)) for picture, number in make_pictures(6, 10)]
    for part in ("train", "test"):
        write_parquet(tmp_path / PART.format(part), [*rows, (rows[0][0], label)])
    with pytest.raises(InputError, match=rf"train-00000-of-00001.parquet, row 6 has the {label_text}"):
        make_published("eurosat", tmp_path).load_samples("train")
