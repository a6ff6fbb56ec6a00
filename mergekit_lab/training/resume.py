"""Checkpoints to resume from. They are sealed when written, and used only if the seal matches.

A checkpoint of torch is a zip file, and the seal is its comment. The seal names the training, the hash of the
weights it started from, and a digest of names, sizes and checksums of everything inside: weights, moments,
step. It costs nothing, because torch has computed the checksums.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from mergekit_lab.errors import InputError, say_error
from mergekit_lab.machine import count_cores

log = logging.getLogger(__name__)
_WRONG = {
    "content": "it is not as this program wrote it",
    "identity": "it is of another training",
    "base": "it was trained from other weights",
}


class SealedCheckpoints(TorchCheckpointIO):
    """The checkpoints of one training.

    They are written directly in their folder, sealed, then renamed. Lightning itself makes two copies in memory
    first, and a file on the temporary disk.

    Args:
        identity: what is made, such as an artifact's key.
        state: the weights that training starts from.
    """

    def __init__(self, identity: str, state: Mapping[str, Tensor]) -> None:
        self._origin = {"identity": identity, "base": hash_weights(state)}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.unlink(missing_ok=True)
        try:
            with part.open("wb") as out:  # Python says what failed, torch's own writer where in the file it was
                torch.save(checkpoint, out)
            with ZipFile(part, "a") as archive:
                archive.comment = json.dumps(self._make_seal(archive)).encode()
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)  # half of it would keep a full disk full

    def _make_seal(self, archive: ZipFile) -> dict[str, str]:
        inside = sorted((entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist())
        return {**self._origin, "content": hashlib.sha256(json.dumps(inside).encode()).hexdigest()}

    def read(self, file: Path) -> dict[str, Any]:
        """Load a checkpoint with this training's seal onto the CPU, and compare its bytes with their checksums.

        Raises:
            ValueError: it belongs to another training, or is damaged or changed. Other errors mean that it is
                no checkpoint.
        """
        if not file.is_file():
            raise ValueError("it is no regular file" if file.exists() else "it is gone")
        with ZipFile(file) as archive:
            seal, wanted = json.loads(archive.comment or "{}"), self._make_seal(archive)
            if wrong := [why for name, why in _WRONG.items() if seal.get(name) != wanted[name]]:
                raise ValueError(wrong[0])
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
            stored = all(entry.compress_type == ZIP_STORED for entry in archive.infolist())
        # torch maps what another program compressed without a look
        loaded: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu", mmap=stored)
        return loaded

    def find_last(self, folder: Path) -> Path | None:
        """The `last.ckpt` of an interrupted training, if it and the best checkpoint it names are usable.

        The log says why a checkpoint cannot be used. What is no regular file (a pipe, a device) is removed.

        Raises:
            InputError: the folder is a file, or a folder has a checkpoint's name.
        """
        if folder.exists() and not folder.is_dir():
            raise InputError(f"checkpoints go into {folder}, which is not a folder: move it away")
        for path in (folder / f"{name}{suffix}" for name in ("last", "best") for suffix in (".ckpt", ".part")):
            if path.is_dir():
                raise InputError(
                    f"{path} is a folder, but training writes a file there: move it away, or delete it"
                )
            if path.exists() and not path.is_file():
                log.warning("%s is neither file nor folder: it is removed", path)
                path.unlink(missing_ok=True)
        last = file = folder / "last.ckpt"
        if not last.exists():
            return None
        try:
            callbacks = self.read(last)["callbacks"].values()
            for name in {Path(kept.get("best_model_path") or last).name for kept in callbacks} - {last.name}:
                file = folder / name
                self.read(file)
        except Exception as error:
            log.warning("cannot resume from %s (%s): training starts again", file, say_error(error))
            return None
        log.info("resuming from %s", last)
        return last


def hash_weights(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes, dtypes and bytes of tensors."""

    def digest(entry: tuple[str, Tensor]) -> bytes:
        name, tensor = entry
        own = hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        own.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return own.digest()

    with ThreadPoolExecutor(count_cores()) as pool:
        return hashlib.sha256(b"".join(pool.map(digest, state.items()))).hexdigest()
