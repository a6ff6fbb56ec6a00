"""Merging methods as a configuration names them."""

from __future__ import annotations

from typing import Any


def without_null_coefficient(node: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The node without `coefficient: null` (at its top, or in its `inner`), and whether there was one."""
    kept = {name: value for name, value in node.items() if not (name == "coefficient" and value is None)}
    any_left_out = len(kept) < len(node)
    if isinstance(kept.get("inner"), dict):
        kept["inner"], inner_found = without_null_coefficient(kept["inner"])
        any_left_out = any_left_out or inner_found
    return kept, any_left_out
