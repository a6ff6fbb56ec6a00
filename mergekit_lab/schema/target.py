"""How a schema declares what a `_target_` makes."""

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Target(dict[str, Any], Generic[T]):
    """A field that its `_target_` builds: `Target[Method]` is a method, or a user's subclass.

    A class that lies to the right of the schema is named: `Target[Literal["package.module.Class"]]`.
    """
