"""Data that is there and broken: told by file and row, counted by the check, and never a traceback."""

import io
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_repos import (
    encode_picture,
    make_pictures,
    make_published,
    write_folders,
    write_parquet,
    write_repository,
    write_tar,
)
from PIL import Image

from mergekit_lab import InputError
from mergekit_lab.tasks import check_task

GRAY = " ".join(["7"] * 48 * 48)


def write_fer2013(folder: Path, *test: str, columns: str = "emotion,pixels,Usage") -> None:
    train = [f"{i % 7},{GRAY},Training" for i in range(14)]
    (folder / "fer2013.csv").write_text("\n".join([columns, *train, *test]) + "\n")


def test_a_row_without_a_picture_is_named_and_counted(tmp_path: Path) -> None:
    for seed, part in enumerate(("train", "test")):
        write_parquet(tmp_path / f"{part}-0.parquet", [*make_pictures(10, 10, seed), (None, 0)])
    with pytest.raises(InputError, match=r"\(test-0.parquet,.*10\)"):
        make_published("eurosat", tmp_path).load_samples("test")
    assert check_task(make_published("eurosat", tmp_path)).parts["test"].corrupt == ["test-0.parquet, row 10"]


def test_a_test_image_that_is_none_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", make_pictures(20, 10))
    write_parquet(tmp_path / "test-0.parquet", [*make_pictures(10, 10, 1), (b"no image", 0)])
    with pytest.raises(InputError, match=r"\(test-0.parquet,.*10\)"):
        make_published("eurosat", tmp_path).fingerprint()


def test_a_parquet_file_that_is_broken_beyond_its_header_is_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_parquet(tmp_path / f"{part}-0.parquet", make_pictures(20, 10))
    with (tmp_path / "test-0.parquet").open("r+b") as file:
        file.seek(20)
        file.write(b"\xff" * 2000)
    with pytest.raises(InputError, match=r"test-0\.parquet is not"):
        make_published("eurosat", tmp_path).load_samples("test")


def test_a_copy_that_lacks_a_shard_is_refused(tmp_path: Path) -> None:
    write_repository(make_published("eurosat", tmp_path), tmp_path)
    (tmp_path / "data" / "test-00001-of-00002.parquet").unlink()
    with pytest.raises(InputError, match="lacks 1 of 2 files data/test-…"):
        make_published("eurosat", tmp_path).count("test")


def test_a_column_that_holds_no_bytes_is_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        pq.write_table(pa.table({"image": ["a.png"], "label": [0]}), tmp_path / f"{part}-0.parquet")
    with pytest.raises(InputError, match="in its column 'image'"):
        make_published("eurosat", tmp_path).load_samples("test")


def test_a_picture_beyond_pillows_limit_is_named_and_counted(tmp_path: Path, monkeypatch) -> None:
    for seed, part in enumerate(("train", "test")):
        write_parquet(tmp_path / f"{part}-0.parquet", make_pictures(10, 10, seed))
    write_parquet(tmp_path / "test-1.parquet", [(encode_picture(5, 200, 100), 0)])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9000)
    with pytest.raises(InputError, match=r"\(test-1.parquet,.*0\)"):
        make_published("eurosat", tmp_path).load_samples("test")
    check = check_task(make_published("eurosat", tmp_path))
    assert check.wrong == ["eurosat: 1 images of test cannot be decoded"]


@pytest.mark.parametrize("pixels", ["7 7 seven 7", "7 7 7", "7 7 7 300", ""])
def test_pixels_of_fer2013_that_are_none_are_named_and_counted(pixels: str, tmp_path: Path) -> None:
    write_fer2013(tmp_path, f"0,{GRAY},PublicTest", f"1,{pixels},PrivateTest")
    with pytest.raises(InputError, match=r"\(fer2013.csv,.*17\)"):
        make_published("fer2013", tmp_path).load_samples("test")
    assert check_task(make_published("fer2013", tmp_path)).parts["test"].corrupt == ["fer2013.csv, line 17"]


def test_fer2013_without_a_column_or_a_number_is_refused(tmp_path: Path) -> None:
    write_fer2013(tmp_path, columns="emotion,pixels")
    with pytest.raises(InputError, match="has no column Usage"):
        make_published("fer2013", tmp_path).load_samples("test")
    write_fer2013(tmp_path, f"glad,{GRAY},PublicTest")
    with pytest.raises(InputError, match=r"16.*emotion is 'glad'"):
        make_published("fer2013", tmp_path).load_samples("test")
    assert "the emotion is 'glad'" in check_task(make_published("fer2013", tmp_path)).wrong[0]


@pytest.mark.parametrize("name", ["backup.tar", "train.tar"])
def test_an_archive_beside_folders_of_classes_does_not_hide_them(name: str, tmp_path: Path) -> None:
    classes = list(make_published("eurosat", tmp_path).classes)
    for seed, part in enumerate(("train", "test")):
        write_folders(tmp_path / part, make_pictures(20, 10, seed), classes)
    with tarfile.open(tmp_path / name, "w") as archive:
        archive.add(tmp_path / "train" / "forest", "forest")
    assert make_published("eurosat", tmp_path).count("train") == 18


def test_an_image_without_a_label_in_a_web_data_set_is_left_out(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_tar(tmp_path / part / "0.tar", make_pictures(12, 10))
        picture = tmp_path / "more.jpg"
        picture.write_bytes(encode_picture(3))
        with tarfile.open(tmp_path / part / "0.tar", "a") as archive:
            archive.add(picture, "more.jpg")
    assert make_published("eurosat", tmp_path).list_labels("test")[0].tolist() == [i % 10 for i in range(12)]


def list_refusals(name: str, folder: Path) -> list[str]:
    """What a run is told, and what `stage=check_data` tells."""
    with pytest.raises(InputError) as caught:
        make_published(name, folder).fingerprint()
    return [str(caught.value), *check_task(make_published(name, folder)).wrong]


@pytest.mark.parametrize(
    ("label", "dtype"),
    [
        (1e300, pa.float64()),
        (float("nan"), pa.float64()),
        (float("-inf"), pa.float64()),
        (2**64 - 1, pa.uint64()),
        (None, pa.int64()),
    ],
)
def test_a_label_that_numbers_no_class_is_named_by_its_row(label, dtype, tmp_path: Path) -> None:
    images = [{"bytes": picture, "path": ""} for picture, _ in make_pictures(11, 10)]
    table = pa.table({"image": images, "label": pa.array([*range(10), label], dtype)})
    for part in ("train", "test"):
        pq.write_table(table, tmp_path / f"{part}-0.parquet")
    assert all(
        "train-0.parquet, row 10 has the label" in message for message in list_refusals("eurosat", tmp_path)
    )


def test_a_name_that_is_missing_among_names_is_named_by_its_row(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_parquet(tmp_path / f"{part}-0.parquet", [*((b"", "forest") for _ in range(3)), (b"", None)])
    assert all("row 3 has the label None" in message for message in list_refusals("eurosat", tmp_path))


def test_a_column_of_pictures_as_texts_is_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_parquet(tmp_path / f"{part}-0.parquet", [("text", n) for n in range(10)])
    assert all("expected the bytes of images" in message for message in list_refusals("eurosat", tmp_path))


def add_to_tar(file: Path, **members: bytes | tarfile.TarInfo) -> None:
    write_tar(file, make_pictures(12, 10))
    with tarfile.open(file, "a") as archive:
        for ending, content in members.items():
            member = tarfile.TarInfo(f"odd.{ending}") if isinstance(content, bytes) else content
            member.name = f"odd.{ending}"
            member.size = len(content) if isinstance(content, bytes) else 0
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)


@pytest.mark.parametrize("ending", ["cls", "png"])
@pytest.mark.parametrize(
    "member_type", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_a_member_that_is_no_file_is_named(member_type: bytes, ending: str, tmp_path: Path) -> None:
    member = tarfile.TarInfo()
    member.type, member.linkname = member_type, f"odd.{ending}"
    for part in ("train", "test"):
        add_to_tar(tmp_path / part / "0.tar", **{"cls": b"1", "png": encode_picture(3), ending: member})
    messages = list_refusals("eurosat", tmp_path)
    assert all(f"train/0.tar: odd.{ending} must be a plain file" in line for line in messages)


@pytest.mark.parametrize("label", [b"9" * 30, b"", b"forest", b"1e0"])
def test_a_label_file_that_holds_no_class_number_is_named(label: bytes, tmp_path: Path) -> None:
    for part in ("train", "test"):
        add_to_tar(tmp_path / part / "0.tar", cls=label, png=encode_picture(3))
    assert all("train/0.tar: the label odd.cls is" in message for message in list_refusals("eurosat", tmp_path))


def test_a_compressed_archive_is_refused_and_not_taken_for_pictures(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        with tarfile.open(tmp_path / part / "0.tar", "w:gz"):
            pass
    assert all("0.tar is not a readable" in message for message in list_refusals("eurosat", tmp_path))


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        (",,", "line 16: the usage is ''"),
        ("1", "line 16: the usage is None"),
        (f",{GRAY},Training", "line 16: the emotion is ''"),
        (f"1{'0' * 30},{GRAY},Training", "line 16: the emotion is '1000"),
    ],
)
def test_a_row_of_fer2013_that_is_none_is_named(line: str, fragment: str, tmp_path: Path) -> None:
    write_fer2013(tmp_path, line)
    assert all(fragment in message for message in list_refusals("fer2013", tmp_path))


def test_an_empty_file_of_fer2013_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fer2013.csv").touch()
    assert all("fer2013.csv has no column" in message for message in list_refusals("fer2013", tmp_path))


@pytest.mark.parametrize("obstacle", ["loop", "broken link", "pipe"])
def test_what_stands_among_pictures_and_is_no_file_is_named(obstacle: str, tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_folders(tmp_path / part, make_pictures(20, 10), list(make_published("eurosat", tmp_path).classes))
    odd = tmp_path / "train" / "forest" / "odd.png"
    if obstacle == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to("odd.png" if obstacle == "loop" else "nothing.png")
    assert all("train/forest/odd.png" in message for message in list_refusals("eurosat", tmp_path))


def test_links_between_folders_that_lead_in_a_circle_are_not_followed(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_folders(tmp_path / part, make_pictures(20, 10), list(make_published("eurosat", tmp_path).classes))
    plain = make_published("eurosat", tmp_path).fingerprint()
    (tmp_path / "train" / "forest" / "again").symlink_to(tmp_path / "train")
    assert make_published("eurosat", tmp_path).fingerprint() == plain


def test_a_pipe_by_the_name_of_a_table_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for part in ("train", "test"):
        os.mkfifo(tmp_path / f"{part}-0.parquet")
    assert all("train-0.parquet" in message for message in list_refusals("eurosat", tmp_path))


def test_a_single_row_of_pixels_is_no_picture(tmp_path: Path) -> None:
    """Resized as others are, it would take gigabytes."""
    for seed, part in enumerate(("train", "test")):
        write_parquet(
            tmp_path / f"{part}-0.parquet", [*make_pictures(10, 10, seed), (encode_picture(5, 5000, 1), 0)]
        )
    assert all(
        "row 10" in message or "cannot be decoded" in message for message in list_refusals("eurosat", tmp_path)
    )
