"""Cores are counted as the system gives them out."""

import os
import subprocess
import sys

import pytest

from mergekit_lab.machine import usable_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken away here")
def test_cores_that_were_taken_away_do_not_count() -> None:
    code = (
        "import os; from mergekit_lab.machine import usable_cores; "
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(usable_cores())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "1"


def test_all_cores_count_where_the_system_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cores() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
