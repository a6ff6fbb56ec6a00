"""The part of a key that stands for code outside this package.

Contents hold configurations, which name classes. If a user edits a class of theirs, results must get new keys.
So a hash of the class's file is part of the content.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra.utils import get_object

_KNOWN = {*sys.stdlib_module_names, "mergekit_lab", "torch"}
"""Packages whose code enters no key: the standard library, torch and this package."""
_HASHES: dict[str, tuple[Any, str]] = {}
"""By module: the spec that it was loaded with, and its file's hash. A spec that is kept gives its `id` to no
later one."""


def describe_code(*nodes: Any) -> dict[str, Any]:
    """`{"code": {class: version}}` of the classes that these configurations name; empty if there are none.

    Listed are classes from outside this package and torch, with their parents from outside. The version is the
    hash of the class's file, or its class attribute `code_version`. A class of this package with a
    `code_version` is listed too.

    Args:
        nodes: plain configurations. Every `_target_` in them is read.
    """
    versions: dict[str, Any] = {}
    for name in _list_targets(nodes):
        versions |= _read_versions(get_object(name))
    return {"code": versions} if versions else {}


def _list_targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield node["_target_"]
        node = list(node.values())
    if isinstance(node, list | tuple):
        for item in node:
            yield from _list_targets(item)


@cache
def _read_versions(target: Any) -> dict[str, Any]:
    """Versions by class. Files are read once in a process, which keeps running the code that it imported."""
    versions = {}
    for each in inspect.getmro(target) if inspect.isclass(target) else (target,):
        name = f"{each.__module__}.{each.__qualname__}"
        if "code_version" in vars(each):
            versions[name] = vars(each)["code_version"]
        elif each.__module__.partition(".")[0] not in _KNOWN:
            versions[name] = _hash_module(each.__module__)
    return versions


def _hash_module(name: str) -> str:
    """Hash a module's file, once for each time that it was loaded: a file that is edited later is not what this
    process runs."""
    module = sys.modules[name]
    if name not in _HASHES or _HASHES[name][0] is not module.__spec__:
        file = getattr(module, "__file__", None)
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""
        _HASHES[name] = module.__spec__, digest
    return _HASHES[name][1]
