"""The notebooks of the documentation run from their first cell to their last."""

from pathlib import Path

import nbformat
import pytest
from programs import start_program

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.ipynb"))
_SHELL = """
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
for cell in CELLS:
    shell.run_cell(cell).raise_error()
"""
"""What a notebook's kernel does with its cells."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    done = start_program(tmp_path, code=f"CELLS = {cells!r}\n{_SHELL}", whole=True).wait()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) < 120, "a page of output is all that a reader reads; is a library's log among it?"
