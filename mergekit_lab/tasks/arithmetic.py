"""Arithmetic word problems from a seeded generator: two text tasks that need no download.

A pair like NumGLUE's. `quantities` needs an everyday fact besides the numbers, such as how many legs a spider
has. `stories` needs a few steps over numbers in the text. Answers are whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from mergekit_lab.ranges import require_choice

from .drawn_text import DrawnText

_PEOPLE = ("Ana", "Ben", "Chen", "Dina", "Emil", "Fatou", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stones", "tickets")
_FACTS = (
    ("spiders", "legs", 8), ("cats", "legs", 4), ("birds", "wings", 2), ("insects", "legs", 6),
    ("weeks", "days", 7), ("days", "hours", 24), ("hours", "minutes", 60), ("years", "months", 12),
    ("dozens", "pieces", 12), ("triangles", "sides", 3), ("squares", "corners", 4), ("hexagons", "sides", 6),
    ("tricycles", "wheels", 3), ("cars", "wheels", 4), ("hands", "fingers", 5), ("decades", "years", 10),
)  # fmt: skip
_QUESTION = "\nAnswer with a number."


def _draw_quantities(draw: Random) -> tuple[str, int]:
    (one, part, each), (other, second, weight) = draw.sample(_FACTS, 2)
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    if draw.random() < 0.5:
        return f"How many {part} do {a} {one} have?", a * each
    if part == second:
        return f"How many {part} do {a} {one} and {b} {other} have together?", a * each + b * weight
    return f"Which number is larger: the {part} of {a} {one} or the {second} of {b} {other}?", max(
        a * each, b * weight
    )


def _draw_stories(draw: Random) -> tuple[str, int]:
    who, friend = draw.sample(_PEOPLE, 2)
    thing = draw.choice(_THINGS)
    a, b, c = draw.randint(10, 60), draw.randint(2, 9), draw.randint(2, 9)
    stories = (
        (f"{who} has {a} {thing} and gives {b} to {friend}. {friend} gives {c} back. How many does {who} have?",
         a - b + c),
        (f"{who} buys {b} boxes of {c} {thing} each and loses {1 + a % b} of them. How many are left?",
         b * c - 1 - a % b),
        (f"{who} has {a} {thing}. {friend} has {b} more. How many do both have together?", 2 * a + b),
        (f"{who} shares {b * c} {thing} equally with {b - 1} friends. How many does each of them get?", c),
    )  # fmt: skip
    return draw.choice(stories)


_KINDS = {"quantities": _draw_quantities, "stories": _draw_stories}


@dataclass(frozen=True)
class WordProblems(DrawnText):
    """Word problems of one kind, quantities or stories; see `DrawnText`."""

    name: str = "stories"
    kind: str = "stories"
    max_new_tokens: int = 6
    train_size: int = 2000
    validation_size: int = 200
    test_size: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(f"task {self.name!r}: kind", self.kind, _KINDS)

    def draw_sample(self, draw: Random) -> tuple[str, str]:
        question, answer = _KINDS[self.kind](draw)
        return question + _QUESTION, str(answer)
