"""The notebook of the documentation runs from top to bottom."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "docs/notebook.ipynb"


def test_the_notebook_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code
    exec(compile("\n".join(code), NOTEBOOK.name, "exec"), {"__name__": "__notebook__"})
