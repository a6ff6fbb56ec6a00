"""Keep files that tasks and backbones make, such as decoded images, in the run's store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mergekit_lab.errors import InputError, say_bytes
from mergekit_lab.machine import count_free_bytes
from mergekit_lab.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreKeeper:
    """A `Keeper` over a store.

    Args:
        store: where files are kept.
        images_limit_gb: the most that decoded images may take in it.
        device: the run's device.
    """

    store: Store
    images_limit_gb: float
    device: torch.device

    def __call__(
        self, kind: str, content: Mapping[str, Any], size: int, make: Callable[[Path], Mapping[str, Any]]
    ) -> Path:
        """The folder with the files of this content. Missing ones are made.

        Files are compared with their hashes, except decoded images, which may be many gigabytes.

        Raises:
            InputError: there is no room for decoded images of this size.
        """
        artifact = self.store.find(kind, content)
        if artifact is None and kind == "images":
            self._check_room(size)
        artifact = artifact or self.store.obtain(kind, content, lambda workspace: make(workspace.out))
        for name in artifact.files if kind != "images" else ():
            artifact.find_file(name)
        return artifact.folder

    def _check_room(self, size: int) -> None:
        """Log how large decoded images will be. Refuse them if they exceed the limit or the free disk."""
        folder = self.store.root / "images"
        held = sum(file.stat().st_size for file in folder.glob("*/images.u8"))
        free, limit = count_free_bytes(folder), self.images_limit_gb * 1e9
        beside = f", beside {say_bytes(held)} of images there" if held else ""
        log.info("decoding into the store: %s%s", say_bytes(size), beside)
        if held + size > limit or size > free:
            raise InputError(
                f"decoded images need {say_bytes(size)} beside {say_bytes(held)} in {folder}, but "
                f"images_limit_gb is {limit / 1e9:g} and the disk has {say_bytes(free)} free: delete that "
                "folder, raise the limit, or set store.root=PATH"
            )
