"""Glyphs that the shipped model may see in pre-training: none that a task validates or tests on.

The rule is by content, so it holds across tasks. A (character, face) pair is left out if its clean bitmap is a
validation or test picture of any shipped rendered task.
"""

import unicodedata
from functools import cache

from .glyph_tasks import SHIPPED, Pair
from .glyphs import FACES, digest, list_characters
from .task import PARTS


@cache
def find_held_out() -> frozenset[str]:
    """Digests of the clean bitmaps of every shipped task's validation and test part."""
    return frozenset(
        digest(*pair) or ""
        for task in SHIPPED
        for part in PARTS
        if part != "train"
        for options in task.list_pairs()[part]
        for pair in options
    )


def list_pretraining_pairs() -> list[Pair]:
    """Every named character with ink in every face, except what is held out."""
    left_out = find_held_out() | {None}
    return [
        (face, code)
        for face in FACES
        for code in sorted(list_characters(face))
        if unicodedata.name(chr(code), "") and digest(face, code) not in left_out
    ]
