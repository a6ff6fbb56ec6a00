"""Pictures of one pixel, where nobody looks: drawing takes a third of a small run's time."""

import base64
from pathlib import Path
from typing import Any

_ONE_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def save_one_pixel(figure: Any, path: Any, **_: Any) -> None:
    """In place of `Figure.savefig`."""
    Path(path).write_bytes(_ONE_PIXEL)
