"""Data sets that hold programs under the names that are read: told as unreadable, and never run."""

import os
import pickle
from pathlib import Path

import pytest
from hub_repos import encode_picture, make_pictures, make_published, write_folders, write_parquet
from PIL import EpsImagePlugin

from mergekit_lab import InputError
from mergekit_lab.tasks.decoding import decode


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


HOSTILE = pickle.dumps(Bomb())


def write_pickled_parquet(folder: Path, part: str) -> None:
    (folder / f"{part}-00000-of-00001.parquet").write_bytes(HOSTILE)


def write_pickled_tar(folder: Path, part: str) -> None:
    (folder / part).mkdir()
    (folder / part / "0.tar").write_bytes(HOSTILE)


def write_pickled_picture(folder: Path, part: str) -> None:
    write_parquet(folder / f"{part}-00000-of-00001.parquet", [(HOSTILE, 1), *make_pictures(9, 10)])


def write_pickled_file(folder: Path, part: str) -> None:
    write_folders(folder / part, make_pictures(20, 10), [f"{n}" for n in range(10)])
    next((folder / part).rglob("*.png")).write_bytes(HOSTILE)


@pytest.mark.parametrize(
    "plant", [write_pickled_parquet, write_pickled_tar, write_pickled_picture, write_pickled_file]
)
def test_a_pickle_in_a_data_set_is_refused_and_not_run(plant, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for part in ("train", "test"):
        plant(tmp_path / "data", part)
    with pytest.raises(InputError, match=r"not a readable|cannot be decoded|check_data"):
        make_published("eurosat", tmp_path / "data").load_samples("test")
    assert not Path("exploded").exists()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_by_the_name_of_a_picture_starts_no_ghostscript(tmp_path, monkeypatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for seed, part in enumerate(("train", "test")):
        names = [f"{n}" for n in range(10)]
        write_folders(tmp_path / "data" / part, make_pictures(20, 10, seed), names)
        (tmp_path / "data" / part / "1" / "odd.png").write_bytes(POSTSCRIPT)
    with pytest.raises(InputError, match=r"\(train/1/odd.png\)"):
        make_published("eurosat", tmp_path / "data").load_samples("train")
    with pytest.raises(OSError, match="cannot identify"):
        decode(POSTSCRIPT)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_the_formats_that_data_sets_have_are_read(picture_format: str) -> None:
    assert decode(encode_picture(1, 30, 20, picture_format)).size == (30, 20)
