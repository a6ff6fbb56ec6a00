"""Which library a model's folder is for: transformers, open_clip, or both, each with weights of its own.

Some folders on the hub hold one model twice, `model.safetensors` under the names of transformers and
`open_clip_model.safetensors` under those of open_clip. What is read decides what is written and which
configuration goes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergekit_lab.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class Library:
    """How a library wants a model's folder.

    Attributes:
        name: what messages call it.
        config: its configuration file.
        stem: what its safetensors are called.
        sharded: whether it reads several files under an index.
        weights: the files that it looks for.
    """

    name: str
    config: str
    stem: str
    sharded: bool
    weights: tuple[str, ...]


TRANSFORMERS = Library(
    "transformers",
    "config.json",
    "model",
    True,
    ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"),
)
OPEN_CLIP = Library(
    "open_clip",
    "open_clip_config.json",
    "open_clip_model",
    False,
    ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin"),
)
LIBRARIES = (TRANSFORMERS, OPEN_CLIP)


def known_weights(folder: Path) -> list[Path]:
    """The files of a folder that a library looks for: safetensors first, then transformers' first."""
    found = [folder / name for library in LIBRARIES for name in library.weights if (folder / name).is_file()]
    return sorted(found, key=lambda file: ".safetensors" not in file.name)


def library_of(checkpoint: Checkpoint) -> Library | None:
    """The library that loads what was read, or None where no configuration is beside it."""
    folder = checkpoint.folder
    if folder is None:
        return None
    if any(file.name in OPEN_CLIP.weights for file in checkpoint.files):
        return OPEN_CLIP
    return next((library for library in LIBRARIES if (folder / library.config).is_file()), None)


def other_weights(checkpoint: Checkpoint) -> Path | None:
    """The same model for the other library, beside what was read."""
    library = library_of(checkpoint)
    if library is None or checkpoint.folder is None:
        return None
    others = [name for each in LIBRARIES if each is not library for name in each.weights]
    return next((file for file in known_weights(checkpoint.folder) if file.name in others), None)
