"""One folder of artefacts, each named by the content that makes it.

    root/<kind>/<key>/manifest.json + files     published: complete, never changed
    root/work/<kind>/<key>/                     being made; what is left there can be resumed
    root/locks/<kind>-<key>.lock                held by the process that makes it

The key is a hash of everything that decides the result and of nothing else: not the time, the host, a
path or a logger. Publishing is write, fsync, rename, so a killed process leaves a whole artefact or none.
The locks are the operating system's: they end with the process that holds them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mergekit_lab import __version__
from mergekit_lab.checkpoints import sha256_of
from mergekit_lab.errors import InputError

SCHEMA = 1
"""Enters every key: raise it when an artefact of the same content would come out differently."""

_MANIFEST = "manifest.json"
_KEY_DIGITS = 24
_PATIENCE = 0.5
_VERSIONED = ("torch", "open_clip_torch", "lightning")
log = logging.getLogger(__name__)


def content_key(content: Mapping[str, Any]) -> str:
    """A hash of a JSON-able mapping that does not depend on the order of its keys.

    Raises:
        InputError: the content holds something JSON has no form for, or a NaN.
    """
    try:
        text = json.dumps({"schema": SCHEMA, **content}, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"this content cannot name an artefact ({error}): {content!r}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]


@dataclass(frozen=True)
class Artefact:
    """A published folder.

    Attributes:
        kind, key: its name in the store.
        folder: where its files are.
        info: what its maker returned (metrics, times), JSON-able.
        reused: it was there already when it was asked for.
    """

    kind: str
    key: str
    folder: Path
    info: dict[str, Any]
    reused: bool = True

    def file(self, name: str) -> Path:
        return self.folder / name


@dataclass(frozen=True)
class Workplace:
    """Where an artefact is made.

    Attributes:
        out: files that will be published; empty when making starts.
        resume: files that stay when making is cut short, for the next try; not published.
    """

    out: Path
    resume: Path


class Store:
    """Artefacts under one root folder.

    Args:
        root: the folder; made when the first artefact is.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, kind: str, content: Mapping[str, Any]) -> Artefact | None:
        """The artefact of this content, or None.

        Raises:
            InputError: it is there, but its manifest is damaged.
        """
        key = content_key(content)
        folder = self.root / kind / key
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
            return Artefact(kind, key, folder, dict(manifest["info"]))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"the store {self.root} cannot be read ({error}): set store.root=PATH") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"the stored {kind} {key} has a damaged manifest ({error!r}): delete the folder {folder} "
                "to make it again"
            ) from None

    def obtain(
        self, kind: str, content: Mapping[str, Any], make: Callable[[Workplace], Mapping[str, Any]]
    ) -> Artefact:
        """Find the artefact, or make and publish it; of several processes that ask, one makes it.

        Args:
            kind: a folder name, such as "experts".
            content: what decides the result.
            make: writes files into `workplace.out` and returns `info`. If it raises, nothing is published and
                `workplace.resume` stays.
        """
        found = self.find(kind, content)
        if found:
            return found
        key = content_key(content)
        with self._lock(kind, key):
            found = self.find(kind, content)
            if found:
                return found
            shutil.rmtree(self.root / kind / key, ignore_errors=True)  # without a manifest it is no artefact
            work = self.root / "work" / kind / key
            shutil.rmtree(work / "out", ignore_errors=True)
            place = Workplace(work / "out", work / "resume")
            place.out.mkdir(parents=True)
            place.resume.mkdir(exist_ok=True)
            begun = time.monotonic()
            info = dict(make(place)) | {"wall_seconds": round(time.monotonic() - begun, 3)}
            self._publish(kind, key, place.out, content, info)
            shutil.rmtree(work, ignore_errors=True)
            return Artefact(kind, key, self.root / kind / key, info, reused=False)

    @contextmanager
    def _lock(self, kind: str, key: str) -> Iterator[None]:
        folder = self.root / "locks"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / f"{kind}-{key}.lock")
            try:
                lock.acquire(timeout=_PATIENCE)
            except Timeout:
                log.info("waiting for the process that makes %s %s", kind, key)
                lock.acquire()
        except OSError as error:
            raise InputError(
                f"the store {self.root} cannot be written ({error}): set store.root=PATH"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def _publish(
        self, kind: str, key: str, out: Path, content: Mapping[str, Any], info: Mapping[str, Any]
    ) -> None:
        files = {str(p.relative_to(out)): sha256_of(p) for p in sorted(out.rglob("*")) if p.is_file()}
        manifest = {
            "schema": SCHEMA,
            "kind": kind,
            "key": key,
            "content": content,
            "info": info,
            "files": files,
            "versions": {
                "mergekit_lab": __version__,
                "python": platform.python_version(),
                **{name: metadata.version(name) for name in _VERSIONED},
            },
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        (out / _MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        for path in out.rglob("*"):
            _fsync(path)
        target = self.root / kind / key
        target.parent.mkdir(parents=True, exist_ok=True)
        out.rename(target)
        _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
