"""Cores are counted as the system gives them out."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mergekit_lab.machine import count_cores, count_free_bytes, list_devices
from mergekit_lab.merging.devices import parse_devices
from mergekit_lab.runs.run import SPREAD


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken away here")
def test_cores_that_were_taken_away_do_not_count() -> None:
    code = (
        "import os; from mergekit_lab.machine import count_cores; "
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(count_cores())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "1"


def test_all_cores_count_where_the_system_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert count_cores() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert count_cores() == 1


def test_the_disk_of_a_folder_that_is_not_there_yet_is_asked(tmp_path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr("shutil.disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=7))
    assert count_free_bytes(tmp_path / "a/b") == 7
    assert asked == [tmp_path]


@pytest.mark.parametrize(("cards", "auto", "spread"), [(0, 1, 3), (2, 2, 2)])
def test_auto_and_spread_are_every_cuda_device_or_the_cpu(cards, auto, spread, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: cards)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    names = ["cuda:0", "cuda:1", "cuda:2"] if cards else ["cpu"] * 3
    assert list_devices() == names[:auto] == parse_devices("auto")
    assert parse_devices("spread", SPREAD) == names[:spread]
