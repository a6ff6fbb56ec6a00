"""Which library a model's folder is for: transformers, open_clip, or both with separate weights.

Some folders on the hub hold one model twice, `model.safetensors` under the names of transformers and
`open_clip_model.safetensors` under those of open_clip. The files that are read decide which files are written,
and with which configuration.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mergekit_lab.checkpoints.checkpoint import Checkpoint
from mergekit_lab.checkpoints.tied_weights import read_config

NAMED_WEIGHTS = "transformers_weights"
"""The key by which a configuration of transformers 5 names the file of its weights."""


@dataclass(frozen=True)
class Library:
    """How a library wants a model's folder.

    Attributes:
        name: what messages call it.
        config: its configuration file.
        stem: what its safetensors are called.
        sharded: whether it reads several files under an index.
        weights: the files that it looks for, in the order in which it does: the single file counts where an
            index of an earlier save lies beside it.
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
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Folders that `from_pretrained` of transformers loads."""
OPEN_CLIP = Library(
    "open_clip",
    "open_clip_config.json",
    "open_clip_model",
    False,
    ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin"),
)
"""Folders that open_clip loads by `local-dir:`."""
LIBRARIES = (TRANSFORMERS, OPEN_CLIP)
"""The libraries whose folders are read and written."""


def find_weights(folder: Path) -> list[Path]:
    """The files of a folder that a library looks for: safetensors first, then transformers' first.

    A configuration of transformers 5 may name the file itself. Dead links and pipes are among them: opening one
    says what it is.
    """
    names = [n for library in LIBRARIES for n in library.weights if os.path.lexists(folder / n)]
    known = [folder / name for name in sorted(names, key=lambda name: ".safetensors" not in name)]
    named = read_config(folder).get(NAMED_WEIGHTS)
    if isinstance(named, str) and PurePosixPath(named).name == named and os.path.lexists(folder / named):
        return [folder / named, *(file for file in known if file.name != named)]
    return known


def find_library(checkpoint: Checkpoint) -> Library | None:
    """The library that loads what was read, or None without its configuration."""
    folder = checkpoint.folder
    if folder is None:
        return None
    if any(file.name in OPEN_CLIP.weights for file in checkpoint.files):
        return OPEN_CLIP
    return next((library for library in LIBRARIES if (folder / library.config).is_file()), None)


def find_other_weights(checkpoint: Checkpoint) -> Path | None:
    """The other library's weights of the same model in the folder."""
    library = find_library(checkpoint)
    if library is None or checkpoint.folder is None:
        return None
    others = [name for each in LIBRARIES if each is not library for name in each.weights]
    return next((file for file in find_weights(checkpoint.folder) if file.name in others), None)
