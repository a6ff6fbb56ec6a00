"""Looking after a store: what is there, whether it is sound, why something was not found, what may go."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.store.store import (
    SCHEMA,
    Artifact,
    Store,
    content_key,
    discard,
    manifest_digest,
    read_artifact,
)

_REMOVED = "removed"


@dataclass(frozen=True)
class Damage:
    """A published folder that is not as it was published.

    Attributes:
        folder: where it is.
        told: what is wrong, one line.
    """

    folder: Path
    told: str


def damages(artifacts: Iterable[Artifact]) -> list[Damage]:
    """What is wrong with published folders: a file missing, truncated or flipped, a manifest that is not there,
    damaged or another artifact's. What others remove meanwhile is left out."""
    found = []
    for artifact in artifacts:
        told = [told for name in artifact.files if (told := artifact.damage(name))]
        named = f"the stored {artifact.kind} {artifact.key}"
        try:
            read = read_artifact(artifact.folder)
            if content_key(read.content, read.schema) != artifact.key:
                told.append(f"{named} has the manifest of another artifact")
        except FileNotFoundError:
            told.append(f"{named} has no manifest: nothing was published there")
        except (OSError, ValueError, KeyError, TypeError) as error:
            told.append(f"{named} has a damaged manifest ({error!r})")
        if artifact.folder.is_dir():
            found += [Damage(artifact.folder, line) for line in told]
    return found


def unreadable(store: Store) -> Iterator[Artifact]:
    """What stands in the places of artifacts, and has no manifest that can be read."""
    for folder in sorted(store.root.glob("*/*")):
        if folder.parent.name in ("work", "locks") or not folder.is_dir():
            continue
        try:
            read_artifact(folder)
        except (OSError, ValueError, KeyError, TypeError):
            yield from _by_its_place(folder)


def half_made(store: Store) -> Iterator[Artifact]:
    """What was cut in the making and can be resumed; what a process is at work on is left out."""
    for folder in sorted(store.root.glob("work/*/*")):
        kind = folder.parent.name
        if kind != _REMOVED and not (store.root / "locks" / f"{kind}-{folder.name}").exists():
            yield from _by_its_place(folder)


def _by_its_place(folder: Path) -> Iterator[Artifact]:
    """A folder as the artifact that it is, or will be; `created` is when it was last written to."""
    with suppress(OSError):  # it is removed at this moment
        latest = max(each.stat().st_mtime for each in (folder, *folder.rglob("*")))
        created = datetime.fromtimestamp(latest, UTC).isoformat(timespec="seconds")
        yield Artifact(folder.parent.name, folder.name, folder, {}, created=created)


@dataclass(frozen=True)
class Difference:
    """Where two contents part.

    Attributes:
        path: of the key, dotted.
        wanted, stored: the two values; None where there is none.
    """

    path: str
    wanted: Any
    stored: Any


def differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[Difference]:
    """All keys whose values differ, those that say what (not how much) first."""
    one, other = dict(_leaves(wanted)), dict(_leaves(stored))
    names = [*one, *(name for name in other if name not in one)]
    told = [Difference(n, one.get(n), other.get(n)) for n in names]
    parted = [d for d in told if json.dumps(d.wanted) != json.dumps(d.stored)]  # as keys have it: 1 is not 1.0
    return sorted(parted, key=lambda d: isinstance(d.wanted, int | float) and isinstance(d.stored, int | float))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def nearest(store: Store, kind: str, wanted: Mapping[str, Any]) -> tuple[Artifact, list[Difference]] | None:
    """The artifact of this kind that differs in the fewest keys, and in which; None if there is none.

    Where no key differs, it was made under another schema.
    """
    found = [(a, differences(wanted, a.content)) for a in store.artifacts() if a.kind == kind]
    return min(found, key=lambda pair: len(pair[1]), default=None)


def older_than(artifact: Artifact, days: float) -> bool:
    """Whether it was made more than so many days ago."""
    made = datetime.fromisoformat(artifact.created.replace("Z", "+00:00"))
    return (datetime.now(UTC) - made) / timedelta(days=1) > days


def size(artifact: Artifact) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in artifact.folder.rglob("*") if file.is_file())


def remove(store: Store, folder: Path) -> None:
    """Take an artifact's folder out: by a rename first, so that nobody finds half of it.

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
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        schema, kind, content = manifest["schema"], str(manifest["kind"]), dict(manifest["content"])
        key, info = manifest["key"], dict(manifest["info"])
        files = {str(name): str(digest) for name, digest in manifest["files"].items()}
    except FileNotFoundError:
        raise InputError(
            f"{folder} has no manifest.json: was it exported? Experts of others come with experts=…"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / 'manifest.json'} cannot be used: {error!r}") from None
    if schema != SCHEMA:
        raise InputError(
            f"{folder} has schema {schema}, and this version writes {SCHEMA}: see docs/reliability.md"
        )
    if not kind.isidentifier() or kind in ("work", "locks"):
        raise InputError(f"{folder / 'manifest.json'} names the kind {kind!r}")
    for name in files:
        up = Path(name).is_absolute() or ".." in Path(name).parts  # also by a way that comes back
        if up or "\0" in name or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{folder / 'manifest.json'} names {name!r}, which lies outside of its folder")
    if key != content_key(content):
        raise InputError(
            f"{folder / 'manifest.json'} was changed: its content has the key {content_key(content)}, not {key}"
        )
    if manifest.get("digest", digest := manifest_digest(manifest)) != digest:
        raise InputError(f"{folder / 'manifest.json'} was changed: it is not as it was published")
    origin = Artifact(kind, key, folder, {}, files=files)
    wrong = [told for name in files if (told := origin.damage(name))]
    if wrong:
        raise InputError("; ".join(wrong))

    def make(place: Any) -> Mapping[str, Any]:
        for name in files:
            (place.out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, place.out / name)
        return {**info, "imported": True}

    return store.obtain(kind, content, make)
