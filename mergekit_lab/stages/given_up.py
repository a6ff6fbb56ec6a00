"""Word of work that failed when a sweep did it once for all of its jobs, so that no job tries it again.

It is a file beside the jobs' folders, which is there while the sweep goes on: a later sweep tries again.
"""

import json
from collections.abc import Mapping
from pathlib import Path

SHARED = "training"
"""The folder, beside those of a sweep's jobs, of the trainings that they share."""
_FILE = "given_up.json"


def give_up(sweep: Path, failures: Mapping[str, str]) -> None:
    """Leave word in a sweep's folder: by `KIND KEY` of what was not made, what jobs that need it are to say."""
    file = sweep / SHARED / _FILE
    if failures:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(failures, indent=1) + "\n")
    else:
        file.unlink(missing_ok=True)


def given_up(sweep: Path) -> dict[str, str]:
    """What `give_up` left there."""
    try:
        return dict(json.loads((sweep / SHARED / _FILE).read_text()))
    except (OSError, ValueError):  # a disk that is full cuts it short
        return {}
