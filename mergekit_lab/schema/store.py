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
        action: "list"; "verify" hashes, and take out what differs; "explain" why what the composed run wants
            is not there; "prune"; "export" one artifact as a folder; "import" such a folder.
        kind, key: narrow it to a kind ("experts"), or to keys that begin so.
        older_than: narrow it to what was made more than so many days ago.
        which: prune "all", what the composed "run" wants, or all "others" but what is made of data alone, which
            goes where `kind` names it.
        confirm: verify and prune remove; otherwise they say what would go.
        path: of the folder exported or imported.
        push_to: a repository of the hub, `org/name`, that gets what is exported as a new commit.
        push_private: whether a repository that is made for it is private.
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
