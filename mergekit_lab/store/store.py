"""One folder of artifacts, each named by the content that makes it.

    root/<kind>/<key>/manifest.json + files     published: complete, never changed
    root/work/<kind>/<key>/                     being made; what is left there can be resumed
    root/locks/<kind>-<key>/                    held by the process that makes it

The key is a hash of everything that decides the result and of nothing else: not the time, the host, a
path or a logger. Publishing is write, fsync, rename, so a killed process leaves a whole artifact or none.
The file system needs only an atomic rename (see `lock`), so hosts can share a store over NFS.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mergekit_lab import __version__
from mergekit_lab.digests import TICK, hash_bytes
from mergekit_lab.errors import InputError
from mergekit_lab.paths import is_stream, sync_to_disk
from mergekit_lab.store.artifact import (
    DAMAGE,
    MANIFEST,
    SCHEMA,
    TIME,
    Artifact,
    digest_manifest,
    explain_unknown,
    make_key,
    read_artifact,
)
from mergekit_lab.store.files import discard, read_file
from mergekit_lab.store.lock import FolderLock

NO_KINDS = ("work", "locks", "data", "packages")
"""Folders of a store that hold no artifacts: a user's texts and downloaded models are two of them."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS = ("No space left", "os error 28", "os error 27", "PytorchStreamWriter failed writing")
_LARGE = 1 << 24
_BEGINNING = "begun.json"
"""In the folder of what is being made: when this try began, as its time, and the seconds of earlier ones."""
_LONGEST = 3 * 86400
"""Seconds that count of one try. More, and the clock was set meanwhile."""
_VERSIONED = ("torch", "open_clip_torch", "lightning", "transformers")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workspace:
    """The folders that an artifact is made in.

    Attributes:
        out: files to publish; empty at the start.
        resume: files for the next try after an interruption; not published.
    """

    out: Path
    resume: Path


class Store:
    """Artifacts under one root folder.

    Args:
        root: the folder; made when the first artifact is.
        stale_after: seconds without a sign of life after which another host's lock counts as abandoned.
    """

    def __init__(self, root: Path, stale_after: float = 60.0) -> None:
        self.root = root
        self.stale_after = stale_after

    def find(self, kind: str, content: Mapping[str, Any]) -> Artifact | None:
        """The artifact of this content, or None.

        Raises:
            InputError: it is there, but its manifest is damaged.
        """
        key = make_key(content)
        folder = self.root / kind / key
        try:
            if not folder.is_dir():
                return None
            artifact = read_artifact(folder)
            if make_key(artifact.content, artifact.schema) != key:
                raise ValueError("it is another artifact's")
            return artifact
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise InputError(f"the store {self.root} cannot be read ({error}): set store.root=PATH") from None
        except DAMAGE as error:
            raise InputError(
                f"the stored {kind} {key} has a damaged manifest ({error!r}): delete the folder {folder} "
                "(or run stage=store store.action=verify store.confirm=true) to make it again"
            ) from None

    def list_artifacts(self, kind: str | None = None) -> Iterator[Artifact]:
        """All published artifacts, or those of one kind, by kind and age, except those with a damaged manifest.

        Raises:
            InputError: a folder of the store, or of an artifact, cannot be read.
        """
        aged = []
        for folder in self.list_folders(kind):
            try:
                aged.append(((folder / MANIFEST).stat().st_mtime, read_artifact(folder)))
            except PermissionError as error:
                raise explain_unknown(folder, str(error.strerror)) from None
            except DAMAGE:  # others may remove some meanwhile
                continue
        yield from (artifact for _, artifact in sorted(aged, key=lambda pair: (pair[1].kind, pair[0])))

    def list_folders(self, only: str | None = None) -> Iterator[Path]:
        """What stands where artifacts are published, sound or not; what is being made is not among it.

        Raises:
            InputError: a folder cannot be read, so that nothing can be said of what is in it.
        """
        for kind in list_folder(self.root) if only is None else [self.root / only]:
            if kind.name.isidentifier() and kind.name not in NO_KINDS:
                yield from (folder for folder in list_folder(kind) if not folder.name.startswith("."))

    def obtain(
        self, kind: str, content: Mapping[str, Any], make: Callable[[Workspace], Mapping[str, Any]]
    ) -> Artifact:
        """Find the artifact, or make and publish it; of several processes that ask, one makes it.

        Args:
            kind: a folder name, such as "experts".
            content: what decides the result.
            make: writes files into `workspace.out` and returns `info`; its `wall_seconds`, if any, are those of
                results that it took from other artifacts. If it raises, nothing is published and
                `workspace.resume` stays.
        """
        key = make_key(content)
        while not (artifact := self.find(kind, content)):
            with self._lock(kind, key) as lock:
                with suppress(OSError):  # NFS asks its server anew what is in a folder that is opened
                    os.close(os.open(self.root / kind, os.O_RDONLY | os.O_DIRECTORY))
                if self.find(kind, content):
                    continue
                try:
                    self._make(lock, kind, key, content, make)
                except Exception:
                    if lock.held:
                        raise
                    log.warning("%s %s was taken over by another process: waiting for it", kind, key)
                    continue
            artifact = self.find(kind, content)
            if artifact is None:
                raise InputError(f"{kind} {key} has disappeared: was {self.root / kind / key} deleted?")
            return replace(artifact, reused=False)
        return artifact

    def _make(
        self,
        lock: FolderLock,
        kind: str,
        key: str,
        content: Mapping[str, Any],
        make: Callable[[Workspace], Mapping[str, Any]],
    ) -> None:
        work = self.root / "work" / kind / key
        workspace = Workspace(work / f"out-{uuid.uuid4().hex[:8]}", work / "resume")
        with self._explain_writing(workspace):
            with self._require_writable():
                discard(self.root / kind / key)  # without a manifest it is no artifact
                for left in work.glob("out-*"):
                    discard(left)
                _make_folder(self.root / kind)
                _make_folder(work)
                workspace.out.mkdir()
                _clean_resume(workspace.resume)
            spent = _note_beginning(work / _BEGINNING, workspace.resume)
            begun = time.monotonic()
            info = dict(make(workspace))
            recalled = info.get("wall_seconds", 0.0)
            info["wall_seconds"] = round(recalled + spent + time.monotonic() - begun, 3)
            self._publish(kind, key, workspace.out, content, info)
            if lock.held:  # else another process is at work there
                discard(work)

    @contextmanager
    def _lock(self, kind: str, key: str) -> Iterator[FolderLock]:
        folder = self.root / "locks"
        lock = FolderLock(folder / f"{kind}-{key}", f"{kind} {key}", stale_after=self.stale_after)
        with ExitStack() as held:
            with self._require_writable():
                _make_folder(folder)
                held.enter_context(lock)
            lock.clear_around()
            yield lock

    @contextmanager
    def _require_writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"the store {self.root} cannot be written ({error}): set store.root=PATH"
            ) from error

    @contextmanager
    def _explain_writing(self, workspace: Workspace) -> Iterator[None]:
        """Name a full disk as such, wherever in the making it was met, and so a folder that was deleted
        meanwhile; what can be resumed stays."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not workspace.out.is_dir():
                raise InputError(
                    f"{workspace.out} was deleted while something was made there ({error}): run the same "
                    "command again"
                ) from error
            if isinstance(error, InputError) or not is_full(error):
                raise
            raise InputError(
                f"no room for more in the store {self.root} ({error}): free some (stage=store "
                "store.action=prune), or set store.root=PATH; what was finished is kept"
            ) from error

    def _publish(
        self, kind: str, key: str, out: Path, content: Mapping[str, Any], info: Mapping[str, Any]
    ) -> None:
        paths = {str(p.relative_to(out)): p for p in sorted(out.rglob("*")) if p.is_file()}
        if any(path.stat().st_size > _LARGE for path in paths.values()):
            time.sleep(TICK / 1e9)  # so that large files have versions, and are not hashed again
        with ThreadPoolExecutor(1, "sync") as pool:  # while the disk writes, the same bytes are hashed
            synced = [pool.submit(sync_to_disk, path) for path in paths.values()]
            files = {name: hash_bytes(path) for name, path in paths.items()}
            for each in synced:
                each.result()
        manifest = {
            "schema": SCHEMA,
            "kind": kind,
            "key": key,
            "content": content,
            "info": info,
            "files": files,
            "versions": _list_versions(),
            "created": time.strftime(TIME, time.gmtime()),
        }
        manifest["digest"] = digest_manifest(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        (out / MANIFEST).write_bytes(text.encode(errors="backslashreplace"))  # JSON's own escapes
        for path in (out / MANIFEST, out, *(path for path in out.rglob("*") if path.is_dir())):
            sync_to_disk(path)
        target = self.root / kind / key
        _make_folder(target.parent)
        try:
            out.rename(target)
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise InputError(
                    f"{target.parent} is on another file system than {out.parent}, so renames fail: link "
                    f"the whole store {self.root}, not its folders"
                ) from None
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            log.info("%s %s was published by another process meanwhile", kind, key)  # ours was taken for dead
        sync_to_disk(target.parent)


@cache
def _list_versions() -> dict[str, str]:
    return {
        "mergekit_lab": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _VERSIONED},
    }


def list_folder(folder: Path) -> list[Path]:
    """List a folder's content, sorted; empty if there is no folder.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        if not folder.is_symlink():
            return []
        reason = "it is a link to nowhere"
    except OSError as error:
        reason = str(error.strerror)
    raise explain_unknown(folder, reason)


def _make_folder(folder: Path) -> None:
    """Make a folder of the store.

    Raises:
        InputError: something else stands in its place.
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        above = (*reversed(folder.parents), folder)
        wrong = next((path for path in above if os.path.lexists(path) and not path.is_dir()), None)
        if wrong is None:
            raise
        raise InputError(
            f"{wrong} is not a folder, but the store keeps one there: move it away, or set store.root=PATH"
        ) from None


def _note_beginning(file: Path, resume: Path) -> float:
    """Note that a try begins, and return the seconds of earlier ones, up to what each left to resume from."""
    left = [path.stat().st_mtime for path in resume.rglob("*") if path.is_file()]
    spent = 0.0
    with suppress(*DAMAGE):  # the first try, or not as it was written
        spent = float(json.loads(read_file(file, 1 << 10)))
        taken = max(left, default=0.0) - file.stat().st_mtime
        spent += taken if 0 <= taken <= _LONGEST else 0.0
    spent = spent if left and 0 <= spent < math.inf else 0.0
    discard(file)
    file.write_text(json.dumps(spent))
    return spent


def _clean_resume(folder: Path) -> None:
    """A folder that holds nothing but files and folders: what reads them waits for no pipe."""
    if not folder.is_dir():
        discard(folder)
    folder.mkdir(exist_ok=True)
    for path in folder.rglob("*"):
        if is_stream(path):
            log.warning("%s is a pipe or a device, and is removed", path)
            discard(path)


def is_full(error: BaseException) -> bool:
    """Whether an error, or one that it came from, is that of a full disk; writers outside of Python (torch,
    safetensors) say it in words alone."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "errno", None) in _FULL or any(word in str(cause) for word in _FULL_WORDS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
