"""Data sets that hold pickles under the names that are read: told as unreadable, and never run."""

import os
import pickle
from pathlib import Path

import pytest
from hub_repos import pictures, published, write_folders, write_parquet

from mergekit_lab import InputError


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


HOSTILE = pickle.dumps(Bomb())


def pickled_parquet(folder: Path, part: str) -> None:
    (folder / f"{part}-00000-of-00001.parquet").write_bytes(HOSTILE)


def pickled_tar(folder: Path, part: str) -> None:
    (folder / part).mkdir()
    (folder / part / "0.tar").write_bytes(HOSTILE)


def pickled_picture(folder: Path, part: str) -> None:
    write_parquet(folder / f"{part}-00000-of-00001.parquet", [(HOSTILE, 1), *pictures(9, 10)])


def pickled_file(folder: Path, part: str) -> None:
    write_folders(folder / part, pictures(20, 10), [f"{n}" for n in range(10)])
    next((folder / part).rglob("*.png")).write_bytes(HOSTILE)


@pytest.mark.parametrize("plant", [pickled_parquet, pickled_tar, pickled_picture, pickled_file])
def test_a_pickle_in_a_data_set_is_refused_and_not_run(plant, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for part in ("train", "test"):
        plant(tmp_path / "data", part)
    with pytest.raises(InputError, match=r"no readable|cannot be decoded|check_data"):
        published("eurosat", tmp_path / "data").split("test")
    assert not Path("exploded").exists()
