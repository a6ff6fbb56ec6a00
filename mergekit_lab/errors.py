"""`InputError`, for mistakes that a user can mend, and the wording of its messages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher, get_close_matches
from reprlib import Repr


class InputError(ValueError):
    """An input is wrong. The message names the thing, the rule and the way out."""


@contextmanager
def name_in_errors(name: str) -> Iterator[None]:
    """Put a name, such as a file's, before the message of an `InputError` raised in the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error.__cause__


def join_names(names: Iterable[str], limit: int = 8) -> str:
    """`a, b, c and 12 more`: the first `limit` names, sorted, and how many are left."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'density'?` where a known name is near, else `; known: …`, the nearest of them first."""
    options = sorted(known)
    if near := get_close_matches(name, options, n=1):
        return f"; did you mean {near[0]!r}?"
    ordered = sorted(options, key=lambda option: -SequenceMatcher(None, name, option).ratio())
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"; known: {', '.join(ordered[:_SHOWN])}{more}"


def say_bytes(size: float) -> str:
    """ "312 bytes", "4.2 MB", "0.51 GB"; never "0 GB" for a small size."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.1 * unit:
            return f"{size / unit:.2f} {name}" if size < unit else f"{size / unit:.1f} {name}"
    return f"{size:.0f} bytes"


def say_duration(seconds: float) -> str:
    """ "0.4 s", "12 s", "3 min 05 s", "2 h 07 min"."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def say_error(error: BaseException) -> str:
    """The first line of an error's message; if it is empty, the name of its class."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def abbreviate(value: object) -> str:
    """A value's `repr`, cut short for a message."""
    return _SHORT.repr(value)


_SHOWN = 12
"""Names that a message lists at most."""
_SHORT = Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = 120
