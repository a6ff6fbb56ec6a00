"""The Python examples in docs/tasks.md run as they stand."""

import re
from pathlib import Path

import pytest

from mergekit_lab.tasks import metrics, text

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "tasks.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.S | re.M)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs(block, monkeypatch):
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))
    monkeypatch.setattr(text, "METRICS", metrics.METRICS)
    monkeypatch.setattr(metrics, "MEANS", set(metrics.MEANS))
    exec(compile(block, "docs/tasks.md", "exec"), {"__name__": "docs_tasks"})


def test_the_page_has_its_examples():
    assert len(BLOCKS) == 3
