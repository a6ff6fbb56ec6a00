"""Groups of keys with a `_target_`: how a schema declares them, and a key of theirs that may be null."""

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Target(dict[str, Any], Generic[T]):
    """The type of a field that a `_target_` builds: `Target[Method]` is a method, or a user's subclass.

    A class that the schema must not import is given by name: `Target[Literal["package.module.Class"]]`.
    """


def without_null_coefficient(node: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The node without `coefficient: null` (at its top, or in its `inner`), and whether there was one."""
    kept = {name: value for name, value in node.items() if not (name == "coefficient" and value is None)}
    any_left_out = len(kept) < len(node)
    if isinstance(kept.get("inner"), dict):
        kept["inner"], inner_found = without_null_coefficient(kept["inner"])
        any_left_out = any_left_out or inner_found
    return kept, any_left_out
