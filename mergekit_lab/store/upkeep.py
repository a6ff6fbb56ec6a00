"""Look after a store: list it, verify it, explain why something was not found, remove what is not needed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from mergekit_lab.errors import InputError
from mergekit_lab.store.artifact import (
    DAMAGE,
    MANIFEST,
    MANIFEST_BYTES,
    SCHEMA,
    Artifact,
    digest_manifest,
    make_key,
    read_artifact,
    show_name,
)
from mergekit_lab.store.files import discard, read_file
from mergekit_lab.store.lock import is_held
from mergekit_lab.store.store import NO_KINDS, Store, Workspace, list_folder

_REMOVED = "removed"
_LATEST = 4e9
"""The latest time of a file, in seconds, that counts: a wrong clock may set one that is not a date."""


class Damage(NamedTuple):
    """A published folder that is not as it was published, and the problem in one line."""

    folder: Path
    message: str


def find_damages(artifacts: Iterable[Artifact]) -> list[Damage]:
    """Problems of published folders: a file that is missing, cut or changed; a manifest that is missing,
    damaged or another artifact's. Folders that others remove meanwhile are left out.
    """
    wrong = []
    for artifact in artifacts:
        messages = [message for name in artifact.files if (message := artifact.find_damage(name))]
        try:
            read = read_artifact(artifact.folder)
            if make_key(read.content, read.schema) != artifact.key:
                messages.append(f"{artifact.title} has the manifest of another artifact")
        except FileNotFoundError:
            messages.append(f"{artifact.title} has no manifest: nothing was published there")
        except NotADirectoryError:
            messages.append(f"{artifact.title} is not a folder")
        except DAMAGE as error:
            messages.append(f"{artifact.title} has a damaged manifest ({error!r})")
        if os.path.lexists(artifact.folder):
            wrong += [Damage(artifact.folder, message) for message in messages]
    return wrong


def find_unreadable(store: Store) -> Iterator[Artifact]:
    """Folders in the place of artifacts without a readable manifest.

    Raises:
        InputError: a folder of the store cannot be read, so that nothing can be said of what is in it.
    """
    for folder in store.list_folders():
        try:
            read_artifact(folder)
        except DAMAGE:
            yield _name_by_folder(folder)


def find_half_made(store: Store) -> Iterator[Artifact]:
    """Artifacts whose making was interrupted and can be resumed, and, as kind "removed", interrupted removals.

    Those that a process works on are left out.

    Raises:
        InputError: a folder of the store cannot be read.
    """
    for kind in list_folder(store.root / "work"):
        for folder in list_folder(kind):
            if not is_held(store.root / "locks" / f"{kind.name}-{folder.name}"):
                yield _name_by_folder(folder)


def _name_by_folder(folder: Path) -> Artifact:
    """A folder as an artifact without content. `created` is when the folder was last written to."""
    latest = max(state.st_mtime for state in _list_states(folder))
    created = datetime.fromtimestamp(min(max(latest, 0), _LATEST), UTC).isoformat(timespec="seconds")
    return Artifact(show_name(folder.parent.name), show_name(folder.name), folder, {}, created=created)


def _list_states(folder: Path) -> Iterator[os.stat_result]:
    """The states of a folder and of everything in it that can be seen. Others may remove files meanwhile."""
    yield os.stat_result((0,) * 10)
    with suppress(OSError):
        for path in (folder, *folder.rglob("*")):
            with suppress(OSError):
                yield path.lstat()


class Difference(NamedTuple):
    """A difference of two contents: the dotted key and both values, None if one has no such key."""

    path: str
    wanted: Any
    stored: Any


def list_differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[Difference]:
    """All settings whose values differ, choices before numbers."""
    one, other = dict(_list_leaves(wanted)), dict(_list_leaves(stored))
    names = [*one, *(name for name in other if name not in one)]
    pairs = [Difference(n, one.get(n), other.get(n)) for n in names]
    parted = [d for d in pairs if json.dumps(d.wanted) != json.dumps(d.stored)]  # as keys have it: 1 is not 1.0
    return sorted(parted, key=lambda d: isinstance(d.wanted, int | float) and isinstance(d.stored, int | float))


def _list_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _list_leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def find_nearest(
    store: Store, kind: str, wanted: Mapping[str, Any]
) -> tuple[Artifact, list[Difference]] | None:
    """The artifact of this kind that differs in the fewest keys, and these. None if there is no such artifact.

    If no setting differs, it was made under another schema.
    """
    pairs = [(a, list_differences(wanted, a.content)) for a in store.list_artifacts() if a.kind == kind]
    return min(pairs, key=lambda pair: len(pair[1]), default=None)


def is_older(artifact: Artifact, days: float) -> bool:
    """Whether it was made more than so many days ago."""
    created = datetime.fromisoformat(artifact.created.replace("Z", "+00:00"))
    return (datetime.now(UTC) - created) / timedelta(days=1) > days


def measure_size(artifact: Artifact) -> int:
    """Bytes of its files."""
    return sum(state.st_size for state in _list_states(artifact.folder) if stat.S_ISREG(state.st_mode))


def remove(store: Store, folder: Path) -> None:
    """Take an artifact's folder out: by a rename first, so that nobody finds half of it.

    A removal that is cut short stays in `find_half_made`, and the next one ends it.

    Raises:
        InputError: the store cannot be changed.
    """
    gone = store.root / "work" / _REMOVED / uuid.uuid4().hex
    try:
        gone.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(gone)
    except FileNotFoundError:  # somebody else was faster
        return
    except OSError as error:
        raise InputError(f"{folder} cannot be removed: {error}") from None
    for left in gone.parent.iterdir():  # also of a removal that was cut short
        discard(left)


def adopt(store: Store, folder: Path) -> Artifact:
    """Publish an exported folder under the key that its manifest gives it.

    Raises:
        InputError: it has no manifest, one of another schema or one that was changed, a file outside of the
            folder is named, or a file is not what the manifest says.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_file(path, MANIFEST_BYTES))
        schema, kind, content = manifest["schema"], str(manifest["kind"]), dict(manifest["content"])
        key, info = manifest["key"], dict(manifest["info"])
        files = {str(name): str(digest) for name, digest in manifest["files"].items()}
        digest, wanted = manifest.get("digest"), digest_manifest(manifest)
    except FileNotFoundError:
        raise InputError(
            f"{folder} has no manifest.json: was it exported? For experts of others, set experts=…"
        ) from None
    except (*DAMAGE, AttributeError) as error:
        raise InputError(f"{path} cannot be used: {error!r}") from None
    if schema != SCHEMA:
        raise InputError(
            f"{folder} has schema {schema}, and this version writes {SCHEMA}: see docs/reliability.md"
        )
    if not kind.isidentifier() or kind in NO_KINDS:
        raise InputError(f"{path} names the kind {kind!r}")
    for name in files:
        if name == MANIFEST or not _is_in(folder, name):
            raise InputError(f"{path} names {name!r}, which lies outside of its folder, or cannot be there")
    if key != make_key(content):
        raise InputError(f"{path} was changed: its content has the key {make_key(content)}, not {key}")
    if digest not in (None, wanted):  # older ones have none
        raise InputError(f"{path} was changed: it is not as it was published")
    origin = Artifact(kind, key, folder, {}, files=files)
    wrong = [message for name in files if (message := origin.find_damage(name))]
    if wrong:
        raise InputError("; ".join(wrong))

    def make(workspace: Workspace) -> Mapping[str, Any]:
        for name in files:
            (workspace.out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, workspace.out / name)
        return {**info, "imported": True}

    return store.obtain(kind, content, make)


def _is_in(folder: Path, name: str) -> bool:
    """Whether a name leads into this folder, by no way that leaves it, and can be one of a file."""
    if Path(name).is_absolute() or ".." in Path(name).parts:  # also by a way that comes back
        return False
    try:
        return (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a circle of links
        return False
