"""`failure.json`: marks a folder whose work has no result, with the reason."""

import json
from pathlib import Path

FILE = "failure.json"


def write_failure(folder: Path, overrides: list[str], error: str) -> None:
    """Write the overrides of the command line, and why there is no result."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps({"overrides": overrides, "error": error}, indent=1) + "\n")


def remove_failure(folder: Path) -> None:
    """Remove the file that an earlier attempt left, if there is one."""
    (folder / FILE).unlink(missing_ok=True)
