"""Settings of the store; importing this needs no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge


@dataclass(frozen=True)
class StoreSettings:
    """Where artifacts are kept, and what `stage=store` does there.

    Args:
        root: a folder; null takes `$MERGEKIT_LAB_STORE`, else the user's cache.
        action: "list" artifacts. "verify" their hashes, and remove those that differ. "explain" why artifacts
            of the composed run are missing. "prune" artifacts. "export" one as a folder. "import" such a
            folder.
        kind, key: restrict the action to a kind ("experts"), or to keys that begin like this.
        older_than: restrict it to artifacts that are more than this many days old.
        which: prune "all" artifacts, those that the composed "run" needs, or all "others". The last keeps what
            is made from data alone, unless `kind` names it.
        confirm: let verify and prune remove artifacts. Otherwise they only say which.
        path: the folder to export to or import from.
        push_to: a repository of the hub, `org/name`, to which the exported artifact is pushed as a new commit.
        push_private: whether a repository that is made for this is private.
    """

    root: str | None
    action: Literal["list", "verify", "explain", "prune", "export", "import"] = "list"
    kind: str | None = None
    key: str | None = None
    older_than: Annotated[float, Ge(0)] | None = None
    which: Literal["all", "run", "others"] = "others"
    confirm: bool = False
    path: str | None = None
    push_to: str | None = None
    push_private: bool = True
