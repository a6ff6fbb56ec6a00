"""Published image data sets as tasks. One configuration file describes each.

Class names and prompt templates are text files in `assets/clip`, with source and license in their first lines.
Images come from a local folder or the hub (`sources.py`) and are decoded once (`decoding.py`). `keep` holds
them: a run's store, or this process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch

from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.ranges import Count, check_value, require
from mergekit_lab.tasks.decoding import FORM, Pictures, index_rows, map_file, shrink_sizes, write_images
from mergekit_lab.tasks.hub import download_data, find_cached_data
from mergekit_lab.tasks.labels import Labeling
from mergekit_lab.tasks.layouts import open_rows
from mergekit_lab.tasks.sources import Rows
from mergekit_lab.tasks.task import PARTS, ImageSamples, ImageTask, Part

log = logging.getLogger(__name__)

_ASSETS = Path(__file__).resolve().parent.parent / "assets" / "clip"
_FILES = ("images.u8", "arrays.npz")
SIDE = 224
"""Of evaluated images, in pixels: what the CLIP models of the published protocol see."""

Make = Callable[[Path], Mapping[str, Any]]


class Keeper(Protocol):
    """Makes a folder of files once and finds it again: `(kind, content, bytes to write, make)` → folder.

    `content` is everything that decides the files, and names the folder. `make` fills an empty folder.

    Attributes:
        device: where arithmetic runs that `make` needs.
    """

    device: torch.device

    def __call__(self, kind: str, content: Mapping[str, Any], size: int, make: Make) -> Path: ...


@dataclass(frozen=True, eq=False)
class HubImages(ImageTask):
    """A published data set of labeled images.

    Args:
        name: the task.
        class_names, prompts: names of files in `assets/clip/classes` and `assets/clip/templates`, or paths to
            your own. They have one entry per line, classes in the order of the labels. Lines that start with
            `#` are comments.
        hub: the data set's repository on the Hugging Face hub, or None.
        subset: the repository's subset, if it has several.
        image_column, label_column: columns of parquet files.
        parts: the source's names of each part, in the order of preference. Without a `validation` part it is
            taken from training: `validation_share` of it, at most `validation_most` images, by a permutation
            from `seed`.
        sizes: published numbers of images, for `stage=check_data`.
        expert: what published fine-tuned checkpoints call the task, or None.
        source: a folder with the data, or another repository. A folder may be a copy of the hub's repository,
            `<part>/<class>/<image>`, or an original archive that has a reader. None looks in `root`, then on
            the hub.
        root: a folder that contains a folder with the task's name, or None.
        keep: holds what is read and decoded; None keeps it as long as the task lives.

    Raises:
        InputError: class names or prompts are missing or malformed; at use, the data cannot be found.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # files can change under equal fields

    class_names: str
    prompts: str
    hub: str | None = None
    subset: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    parts: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {"train": ["train"], "validation": [], "test": ["test"]}
    )
    sizes: Mapping[str, int] = field(default_factory=dict)
    expert: str | None = None
    validation_share: float = 0.1
    validation_most: int = 5000
    seed: int = 0
    source: str | None = None
    root: str | None = None
    keep: Keeper | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if set(self.parts) != set(PARTS) or not self.parts["train"] or not self.parts["test"]:
            raise InputError(
                f"task {self.name!r}: parts must name train, validation (which may be empty) and test, got "
                f"{dict(self.parts)}"
            )
        share, most = self.validation_share, self.validation_most
        require(0 < share < 1, f"task {self.name!r}: validation_share", share, "in (0, 1)")
        check_value(most, Count, f"task {self.name!r}: validation_most")
        if any("{}" not in template for template in self.templates):
            raise InputError(
                f"task {self.name!r}: a prompt of {self.prompts!r} has no '{{}}' for the class name"
            )

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        return _read_lines("classes", self.class_names, self.name)

    @cached_property
    def templates(self) -> tuple[str, ...]:  # type: ignore[override]
        return _read_lines("templates", self.prompts, self.name)

    def find_folder(self) -> Path | None:
        """The data's local folder, or None if it must be downloaded first.

        Raises:
            InputError: the folder `source` or `root` does not exist.
        """
        if self.source is not None and (folder := Path(self.source).expanduser()).exists():
            return folder
        if self.source is not None and self._repository != self.source:
            raise InputError(f"sources.{self.name} is {self.source!r}, which is neither a folder nor a hub id")
        if self.source is None and self.root is not None:
            root = Path(self.root).expanduser()
            if not root.is_dir():
                raise InputError(f"data_root is {self.root!r}, which is not a folder")
            if (inside := root / self.name).is_dir():
                return inside
        return find_cached_data(self._repository, self.wanted_parts, self.subset) if self._repository else None

    @property
    def _repository(self) -> str | None:
        if self.source is not None:
            return self.source if re.fullmatch(r"[\w.-]+/[\w.-]+", self.source) else None
        return self.hub

    @property
    def wanted_parts(self) -> list[str]:
        """The source's names of the required parts."""
        return [self.parts["train"][0], self.parts["test"][0]]

    def download(self, into: Path | None = None) -> Path:
        """Download the data into the hub's cache, or into a folder.

        Raises:
            InputError: the task has no repository, or the download fails.
        """
        if self._repository is None:
            raise InputError(f"the data of {self.name} is on no hub: set sources.{self.name}=FOLDER")
        return download_data(self._repository, self.wanted_parts, self.subset, into, self.parts["validation"])

    def find_missing(self) -> str | None:
        """Where the data would come from, for messages; None if it is here."""
        if self.find_folder() is not None:
            return None
        setting = f"sources.{self.name}=FOLDER" + (f" or {self.root}/{self.name}" if self.root else "")
        hub = f"data set {self._repository} of the hub, or " if self._repository else ""
        return f"{self.name}: {hub}{setting}"

    @cached_property
    def rows(self) -> dict[str, Rows]:
        """The source's parts, with `validation` only if the source has one.

        Raises:
            InputError: the training or test part is missing, or a file cannot be read.
        """
        folder = self.find_folder() or self.download()
        by_part: dict[str, Rows] = {}
        for part in PARTS:
            rows = open_rows(folder, self.parts[part], self.subset, self.image_column, self.label_column)
            if rows is not None:
                by_part[part] = rows
            elif part != "validation":
                raise InputError(
                    f"{folder} holds no part {' or '.join(self.parts[part])} of {self.name}: expected parquet "
                    f"or tar files named by part, or {self.parts[part][0]}/<class>/<image>"
                )
        return by_part

    @cached_property
    def labeling(self) -> Labeling:
        """The source's labels in the task's numbering.

        Raises:
            InputError: a part is empty, or has labels that do not fit the class names.
        """
        return Labeling(self.name, self.classes, self.rows)

    @cached_property
    def _indices(self) -> dict[str, dict[str, np.ndarray]]:
        return {part: self._read_index(self.rows[part], part) for part in self.labeling.labels}

    def _read_index(self, rows: Rows, part: str) -> dict[str, np.ndarray]:
        state = [[str(file.name), file.stat().st_size, file.stat().st_mtime_ns] for file in rows.files]
        seen = hashlib.sha256(json.dumps(state).encode()).hexdigest()
        content: dict[str, Any] = {
            "task": self.name,
            "part": part,
            "files": seen,
            "folder": str(rows.files[0].parent.resolve()),
        }
        content |= {"columns": [self.image_column, self.label_column], "rows": len(rows)}

        def make(out: Path) -> Mapping[str, Any]:
            index: dict[str, Any] = index_rows(rows)
            np.savez(out / _FILES[1], **index)
            return {"images": len(rows)}

        with self._keep("indices", content, 32 * len(rows), make) as folder:
            return dict(np.load(folder / _FILES[1]))

    @contextmanager
    def _keep(self, kind: str, content: Mapping[str, Any], size: int, make: Make) -> Iterator[Path]:
        """The folder that `keep` holds, or one that lasts as long as the context: a mapped file outlives it."""
        if self.keep is not None:
            yield self.keep(kind, content, size, make)
            return
        with TemporaryDirectory() as folder:
            make(Path(folder))
            yield Path(folder)

    def count_validation(self, total: int) -> int:
        """How many of `total` training images become validation, if the source has no such part."""
        return min(int(self.validation_share * total), self.validation_most)

    def list_labels(self, part: Part) -> tuple[np.ndarray, str, np.ndarray]:
        """A part's labels, the source's part it is taken from, and its rows there.

        Raises:
            InputError: the part is empty, or a part of the source has labels that the task lacks.
        """
        where, chosen = self._choose_rows(part)
        labels = self.labeling.labels[where][chosen]
        if len(labels) == 0:
            raise InputError(f"task {self.name!r} has an empty part {part!r}")
        return labels, where, chosen

    def _choose_rows(self, part: Part) -> tuple[str, np.ndarray]:
        """The source's part that a part is taken from, and its rows, ascending."""
        if part == "test" or "validation" in self.rows:
            return part, np.arange(len(self.rows[part]))
        total = len(self.rows["train"])
        count = self.count_validation(total)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(self.seed)).numpy()
        kept = order[: total - count] if part == "train" else order[total - count :]
        return "train", np.sort(kept)

    def digest(self) -> str:
        """Hash of name, classes, templates, and of all parts' encoded images and labels.

        Nothing is decoded, and the same files give the same digest on every machine. Warns of test images that
        are in another part too, byte for byte.

        Raises:
            InputError: a file, which the message names, has no image header.
        """
        digest = hashlib.sha256(repr((self.name, self.classes, self.templates)).encode())
        for part in PARTS:
            digest.update(self._digest_part(part).encode())
        if shared := self._hash_files("test") & (self._hash_files("train") | self._hash_files("validation")):
            log.warning(
                "%s: %d images of the test part are in the training or validation part too: stage=check_data "
                "compares them",
                self.name,
                len(shared),
            )
        return digest.hexdigest()

    def _hash_files(self, part: Part) -> set[bytes]:
        """A part's encoded images by their hashes."""
        where, chosen = self._choose_rows(part)
        return set(map(bytes, self._indices[where]["digests"][chosen]))

    @cached_property
    def _made(self) -> dict[str, Any]:
        """Of this task alone: an equal one reads the files again."""
        return {}

    def count(self, part: Part) -> int:
        return len(self.list_labels(part)[0])

    def _digest_part(self, part: Part) -> str:
        where, chosen = self._choose_rows(part)
        index = self._indices[where]
        unreadable = (index["sizes"][chosen] == 0).any(1).nonzero()[0]
        if len(unreadable):
            names = join_names([self.rows[where].name(int(chosen[at])) for at in unreadable], 3)
            raise InputError(f"{self.name}: no images ({names}): stage=check_data lists all that are corrupt")
        digest = hashlib.sha256(repr((part, len(chosen))).encode())
        for values in (index["digests"], self.labeling.labels[where]):
            digest.update(np.ascontiguousarray(values[chosen]).tobytes())
        return digest.hexdigest()

    def make(self, part: Part) -> ImageSamples:
        """Decode a part, or map the file that an earlier run decoded.

        Raises:
            InputError: an image, which the message names, cannot be decoded; a label exceeds the class names.
        """
        labels, where, chosen = self.list_labels(part)
        rows, sizes = self.rows[where], self._indices[where]["sizes"][chosen]
        side = None if part == "train" else SIDE
        sizes = shrink_sizes(sizes) if side is None else np.full_like(sizes, side)
        content = {"part": self._digest_part(part), "side": side or "shorter side 256", "form": FORM}

        def make(out: Path) -> Mapping[str, Any]:
            write_images(rows, chosen, out / _FILES[0], side, sizes)
            return {"task": self.name, "part": part, "images": len(chosen)}

        with self._keep("images", content, int(3 * sizes.prod(1).sum()), make) as folder:
            data = map_file(folder / _FILES[0])
        images = Pictures(data, sizes, SIDE) if side is None else data.view(-1, 3, side, side)
        return ImageSamples(images, torch.from_numpy(labels))


def _read_lines(kind: str, name: str, task: str) -> tuple[str, ...]:
    own = Path(name).expanduser()
    file = own if own.is_file() else _ASSETS / kind / f"{name}.txt"
    if not file.is_file():
        known = [path.stem for path in (_ASSETS / kind).glob("*.txt")]
        raise InputError(f"task {task!r}: there are no {kind} {name!r}, and no such file{suggest(name, known)}")
    lines = file.read_text(encoding="utf-8").splitlines()
    kept = tuple(line for line in lines if line and not line.startswith("#"))
    if not kept:
        raise InputError(f"task {task!r}: {file} holds no {kind}")
    return kept
