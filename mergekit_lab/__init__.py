"""Fine-tune models for merging, merge them, and measure what each merge keeps.

Importing this package loads no framework: public names are resolved on first use, and
`__init__.pyi` says their types.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "merge": "mergekit_lab.commands.merge_checkpoints",
    "expand": "mergekit_lab.commands.expand",
    "extract": "mergekit_lab.commands.extract",
    "merge_state_dicts": "mergekit_lab.merging",
    "open_checkpoint": "mergekit_lab.checkpoints",
    "run": "mergekit_lab.from_python",
    "InputError": "mergekit_lab.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'mergekit_lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
