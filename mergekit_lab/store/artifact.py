"""What an artifact is: its key, its manifest, and whether its files are as they were published."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mergekit_lab.digests import hash_bytes
from mergekit_lab.errors import InputError
from mergekit_lab.paths import is_stream
from mergekit_lab.store.files import read_file

SCHEMA = 1
"""Enters every key: raise it when an artifact of the same content would come out differently."""

MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 26
"""More is no manifest."""
DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What reading a damaged manifest may raise."""
_KEY_DIGITS = 24
TIME = "%Y-%m-%dT%H:%M:%SZ"
"""How a manifest says when."""


def make_key(content: Mapping[str, Any], schema: int = SCHEMA) -> str:
    """A hash of a JSON-able mapping that does not depend on the order of its keys.

    Args:
        content: what decides an artifact.
        schema: of the version that names it.

    Raises:
        InputError: the content holds something JSON has no form for, or a NaN.
    """
    try:
        text = json.dumps({"schema": schema, **content}, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        shown = "it is nested too deep" if isinstance(error, RecursionError) else repr(content)
        raise InputError(f"this content cannot name an artifact ({error}): {shown}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]


@dataclass(frozen=True)
class Artifact:
    """A published folder.

    Attributes:
        kind, key: its name in the store.
        folder: where its files are.
        info: what its maker returned (metrics, times), JSON-able.
        reused: it was there already when it was asked for.
        files: SHA-256 of its files by name, as published.
        content: what its key is a hash of.
        created: when, UTC, ISO 8601.
        schema: of the version that made it.
    """

    kind: str
    key: str
    folder: Path
    info: dict[str, Any]
    reused: bool = True
    files: Mapping[str, str] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    schema: int = SCHEMA

    def find_file(self, name: str) -> Path:
        """A file's path; its bytes are compared with the hash in the manifest.

        Raises:
            InputError: it was published, and is gone or other than it was.
        """
        if name in self.files and (wrong := self.find_damage(name)):
            raise InputError(
                f"{wrong}: delete the folder {self.folder} (or run stage=store store.action=verify "
                "store.confirm=true), and it is made again"
            )
        return self.folder / name

    def find_damage(self, name: str) -> str | None:
        """A damaged file's problem, or None.

        Raises:
            InputError: this user may not read it, so that nothing can be said of it.
        """
        path, wanted = self.folder / name, self.files.get(name)
        try:
            if is_stream(path):
                return f"{self.title} cannot be read: {name!r} is a pipe or a device, not a file"
            digest, size = hash_bytes(path), path.stat().st_size
        except PermissionError:
            raise explain_unknown(path, "Permission denied") from None
        except OSError as error:
            return f"{self.title} cannot be read: {name!r}: {error.strerror}"
        if digest == wanted:
            return None
        return (
            f"{self.title} is damaged: {name!r} ({size} bytes) has SHA-256 {digest[:12]}…, and "
            f"{str(wanted)[:12]}… was published"
        )

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"the stored {self.kind} {self.key}"


def read_artifact(folder: Path) -> Artifact:
    """A published artifact by its folder.

    Raises:
        FileNotFoundError: nothing is published there.
        OSError, ValueError, KeyError, TypeError, RecursionError: its manifest is damaged.
    """
    manifest = json.loads(read_file(folder / MANIFEST, MANIFEST_BYTES))
    if not isinstance(manifest, dict):
        raise TypeError(f"it holds a {type(manifest).__name__}")
    if manifest.get("digest", digest := digest_manifest(manifest)) != digest:  # older ones have none
        raise ValueError("it is not as it was published")
    return Artifact(
        show_name(folder.parent.name),
        show_name(folder.name),
        folder,
        dict(manifest["info"]),
        files=dict(manifest["files"]),
        content=dict(manifest["content"]),
        created=datetime.fromisoformat(manifest["created"]).strftime(TIME),
        schema=int(manifest["schema"]),
    )


def digest_manifest(manifest: Mapping[str, Any]) -> str:
    """Hash a whole manifest, because an evaluation's results are in no other file."""
    content = json.loads(json.dumps({name: value for name, value in manifest.items() if name != "digest"}))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def explain_unknown(path: Path, reason: str) -> InputError:
    """What to raise where a file or a folder cannot be read."""
    return InputError(f"{show_name(str(path))} cannot be read ({reason}), so its content is unknown")


def show_name(name: str) -> str:
    """A name that others may have given, with escapes for what a terminal would obey or cannot show."""
    return name if name.isprintable() else ascii(name)
