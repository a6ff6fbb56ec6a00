"""Map a source's labels to a task's: by name if the names are the task's, else by number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from mergekit_lab.errors import InputError, join_names
from mergekit_lab.tasks.sources import Rows


class Labeling:
    """A source's labels, in the task's numbering of its classes.

    Args:
        task: its name, for messages.
        classes: the task's class names, in the order of its labels.
        rows: the source's parts.

    Attributes:
        labels: by part, int64 `[N]` in `[0, len(classes))`.

    Raises:
        InputError: a part is empty, or has labels or label names that do not fit the task.
    """

    def __init__(self, task: str, classes: Sequence[str], rows: Mapping[str, Rows]) -> None:
        self._task = task
        self._classes = classes
        self._rows = rows
        self._spelled = simplify if len(set(map(simplify, classes))) == len(classes) else str
        self._places = {self._spelled(name): number for number, name in enumerate(classes)}
        self.labels = {part: self._check(part) for part in rows}

    def find_class(self, name: str) -> int | None:
        """The number of the class with this name, or None.

        Case, spaces and punctuation are ignored, unless the task's own names differ only in them.
        """
        return self._places.get(self._spelled(name))

    def map_numbers(self, part: str) -> np.ndarray:
        """The task's number for each of a part's numbers, int64 `[labels of the part]`.

        If every name of the source is one of the task's, names decide. Otherwise the source's numbers are
        taken. If it has none, or its names are numbers, labels are matched by index in the sorted names of all
        parts: sorted by value if they are numbers, else by the alphabet.
        """
        names, named = self._rows[part].label_names, self._rows[part].by_name
        if names is None:
            return np.arange(len(self._classes))
        pairs = {pair for rows in self._rows.values() for pair in enumerate(rows.label_names or ())}
        known = {name for _, name in pairs}
        if all(self.find_class(name) is not None for name in known):
            return np.array([self.find_class(name) for name in names], dtype=np.int64)
        counted = all(name.isdecimal() for name in known)
        order = sorted(known, key=int) if counted else sorted(known)
        fits = all(self.find_class(name) in (None, number) for number, name in enumerate(order))
        if (counted or named) and fits and len(known) == len(self._classes):
            return np.array([order.index(name) for name in names], dtype=np.int64)
        if named:
            other = join_names(name for name in known if self.find_class(name) is None)
            raise InputError(
                f"task {self._task!r}: the source names {len(known)} classes, and not all of them are "
                f"among the {len(self._classes)} class names ({other}): rename them, or set class_names to "
                "your own file"
            )
        if len(pairs) > len(known):
            raise InputError(
                f"task {self._task!r}: parts of the source give the same class names different numbers"
            )
        return np.arange(max(len(self._classes), len(names)))

    def _check(self, part: str) -> np.ndarray:
        theirs = self._rows[part].labels
        if len(theirs) == 0:
            raise InputError(f"task {self._task!r} has an empty part {part!r}")
        least, most = int(theirs.min()), int(theirs.max())
        if least < 0:
            raise InputError(
                f"task {self._task!r}: {(theirs < 0).sum()} of {len(theirs)} labels of {part!r} are below 0 "
                f"(the least is {least}): is this part published without labels?"
            )
        numbers = self.map_numbers(part)
        if most >= len(numbers) or (ours := numbers[theirs]).max() >= len(self._classes):
            raise InputError(
                f"task {self._task!r} names {len(self._classes)} classes, but labels of {part!r} span "
                f"{least} … {most}: is it another data set?"
            )
        return ours


def simplify(name: str) -> str:
    """Without case, spaces and signs, for comparing; a name of signs alone stays as it is."""
    return re.sub(r"[\W_]+", "", name.lower()) or name
