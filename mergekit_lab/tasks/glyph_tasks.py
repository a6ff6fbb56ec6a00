"""Rendered tasks: alphabets, symbols, accents and typeface styles, drawn from shipped fonts.

Parts share no picture. Alphabets and accents are split by font family: training takes `sans`, `times` and
Computer Modern, validation `serif`, and tests `monospace`. Typeface style is split by character, because the
family is part of its label. A clean bitmap that fits two parts goes to test before validation before training.
One that fits two labels is dropped. `pretraining.py` keeps the validation and test pictures of all tasks out of
pre-training.
"""

import hashlib
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import ClassVar

import torch

from mergekit_lab.errors import InputError
from mergekit_lab.ranges import require_choice

from .glyphs import Face, digest, list_characters, select_faces, stack
from .looks import LOOKS, draw
from .task import PARTS, ImageSamples, ImageTask, Part

Pair = tuple[Face, int]
Pairs = dict[Part, tuple[tuple[Pair, ...], ...]]

_FAMILIES: dict[Part, tuple[str, ...]] = {
    "train": ("sans", "times", "roman", "grotesque", "typewriter"),
    "validation": ("serif",),
    "test": ("monospace",),
}


@dataclass(frozen=True)
class GlyphTask(ImageTask):
    """A task drawn from font glyphs.

    look: a name in `tasks.looks.LOOKS`. seed draws distortions, colors and grain, but not which glyph is in
    which part. Sizes are images; classes differ by at most one image. Raises `InputError` for an unknown look.
    """

    look: str = "poster"
    seed: int = 0
    train_size: int = 2000
    validation_size: int = 500
    test_size: int = 1000

    rendered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_choice(f"task {self.name!r}: look", self.look, LOOKS)

    @classmethod
    @abstractmethod
    def list_candidates(cls) -> Pairs:
        """The (face, code point) pairs that show each class, by part."""

    @classmethod
    @cache
    def list_pairs(cls) -> Pairs:
        """`list_candidates` without pictures that are in two parts, have two labels, or have no ink."""
        candidates = cls.list_candidates()
        labels: dict[str, set[int]] = {}
        for part in PARTS:
            for label, options in enumerate(candidates[part]):
                for pair in options:
                    labels.setdefault(digest(*pair) or "", set()).add(label)
        taken = {""} | {picture for picture, classes in labels.items() if len(classes) > 1}
        parts: Pairs = {}
        for part in reversed(PARTS):
            kept = []
            for name, options in zip(cls.classes, candidates[part], strict=True):
                fresh = {}
                for pair in options:
                    picture = digest(*pair) or ""
                    if picture not in taken:
                        fresh[picture] = pair
                if not fresh:
                    raise InputError(f"{cls.__name__}: no picture of class {name!r} is left for {part!r}")
                kept.append(fresh)
            parts[part] = tuple(tuple(fresh.values()) for fresh in kept)
            taken |= {picture for fresh in kept for picture in fresh}
        return parts

    def make(self, part: Part) -> ImageSamples:
        pairs = self.list_pairs()[part]
        size: int = getattr(self, f"{part}_size")
        key = f"{type(self).__name__} {part} {self.seed}"
        generator = torch.Generator().manual_seed(int(hashlib.sha256(key.encode()).hexdigest()[:12], 16))
        chosen: list[Pair] = []
        labels: list[int] = []
        for label, options in enumerate(pairs):
            count = size // len(pairs) + (label < size % len(pairs))
            order = torch.randperm(len(options), generator=generator).tolist()
            chosen += [options[order[i % len(order)]] for i in range(count)]
            labels += [label] * count
        shuffle = torch.randperm(len(chosen), generator=generator)
        images = draw(stack(chosen)[shuffle], LOOKS[self.look], generator)
        return ImageSamples(images, torch.tensor(labels)[shuffle])


def _combine(faces: Sequence[Face], codes: Iterable[int]) -> tuple[Pair, ...]:
    """Every face with those of the characters that it has."""
    return tuple((face, code) for face in faces for code in codes if code in list_characters(face))


def _choose_by_family(codes: list[list[int]], styles: tuple[str, ...] | None = None) -> Pairs:
    faces = {part: select_faces(_FAMILIES[part], styles) for part in PARTS}
    return {part: tuple(_combine(faces[part], row) for row in codes) for part in PARTS}


def _make_templates(of_class: str) -> tuple[str, ...]:
    return of_class, f"a picture of the {of_class}"


class _Alphabet(GlyphTask):
    symbols: ClassVar[str]
    styles: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def list_candidates(cls) -> Pairs:
        return _choose_by_family([[ord(symbol)] for symbol in cls.symbols], cls.styles)


@dataclass(frozen=True)
class Latin(_Alphabet):
    """The letters a to z."""

    name: str = "latin"
    look: str = "shop window"

    symbols: ClassVar[str] = "abcdefghijklmnopqrstuvwxyz"
    classes: ClassVar[tuple[str, ...]] = tuple(symbols)
    templates: ClassVar[tuple[str, ...]] = _make_templates("latin small letter {}")


def _list_last_words(symbols: str, start: str) -> tuple[str, ...]:
    return tuple(unicodedata.name(symbol).lower().removeprefix(start) for symbol in symbols)


@dataclass(frozen=True)
class Greek(_Alphabet):
    """Small Greek letters except final sigma and omicron, which is Latin o in these fonts."""

    name: str = "greek"
    look: str = "blueprint"

    symbols: ClassVar[str] = "αβγδεζηθικλμνξπρστυφχψω"
    classes: ClassVar[tuple[str, ...]] = _list_last_words(symbols, "greek small letter ")
    templates: ClassVar[tuple[str, ...]] = _make_templates("greek small letter {}")


@dataclass(frozen=True)
class Cyrillic(_Alphabet):
    """Small Russian letters except those that look like Latin or Greek ones (а е к о р с у х).

    Upright styles only, because italic и, п and т look like Latin u, n and m.
    """

    name: str = "cyrillic"
    look: str = "poster"

    symbols: ClassVar[str] = "бвгджзийлмнптфцчшщъыьэюя"
    styles: ClassVar[tuple[str, ...] | None] = ("regular", "bold")
    classes: ClassVar[tuple[str, ...]] = _list_last_words(symbols, "cyrillic small letter ")
    templates: ClassVar[tuple[str, ...]] = _make_templates("cyrillic small letter {}")


@dataclass(frozen=True)
class Math(_Alphabet):
    """Mathematical signs and arrows."""

    name: str = "math"
    look: str = "chalkboard"

    symbols: ClassVar[str] = "∀∂∃∇∈∋∏∑∓√∝∞∠∧∨∩∪∫≈≠≡≤≥⊂⊃⊆⊇⊕⊗±×÷¬←↑→↓↔↕⇐⇒⇔"
    classes: ClassVar[tuple[str, ...]] = _list_last_words(symbols, "")
    templates: ClassVar[tuple[str, ...]] = _make_templates("{}")


@dataclass(frozen=True)
class Accents(GlyphTask):
    """Which mark a Latin letter carries: twelve marks on small and capital letters."""

    name: str = "accents"
    look: str = "neon"

    classes: ClassVar[tuple[str, ...]] = (
        *("acute", "grave", "circumflex", "diaeresis", "tilde", "caron"),
        *("macron", "breve", "dot above", "dot below", "cedilla", "ogonek"),
    )
    templates: ClassVar[tuple[str, ...]] = tuple(
        f"latin {case} letter {letter} with {{}}" for case in ("small", "capital") for letter in "aeinou"
    )

    @classmethod
    def list_candidates(cls) -> Pairs:
        rows: list[list[int]] = [[] for _ in cls.classes]
        for code in (*range(0xC0, 0x250), *range(0x1E00, 0x1F00)):
            match = re.fullmatch(r"LATIN (?:SMALL|CAPITAL) LETTER [A-Z] WITH ([A-Z ]+)", _name(code))
            if match and match[1].lower() in cls.classes:
                rows[cls.classes.index(match[1].lower())].append(code)
        return _choose_by_family(rows)


# Digits, Latin capitals and extensions, IPA, Greek capitals, Cyrillic capitals and extensions, Armenian.
_LETTERS_AND_DIGITS = (
    *((0x30, 0x3A), (0x41, 0x5B), (0x180, 0x2B0)),
    *((0x391, 0x3AA), (0x400, 0x430), (0x460, 0x590)),
)


@dataclass(frozen=True)
class Style(GlyphTask):
    """Weight, slant and family of a letter: regular, bold, italic, bold italic of sans and serif."""

    name: str = "style"
    look: str = "fabric"
    train_size: int = 3000

    classes: ClassVar[tuple[str, ...]] = tuple(
        f"{style} {family}"
        for family in ("sans", "serif")
        for style in ("regular", "bold", "italic", "bold italic")
    )
    templates: ClassVar[tuple[str, ...]] = _make_templates("{} latin capital letter")

    @classmethod
    def list_candidates(cls) -> Pairs:
        others = {
            digest(*pair)
            for task in (Latin, Greek, Cyrillic, Accents)
            for classes in task.list_candidates().values()
            for pair in chain.from_iterable(classes)
        }
        drawn = select_faces(["sans", "serif"])
        codes = [
            code
            for low, high in _LETTERS_AND_DIGITS
            for code in range(low, high)
            if re.search("DIGIT|LETTER", _name(code)) and " WITH " not in _name(code)
            if not others & {digest(face, code) for face in drawn if code in list_characters(face)}
        ]
        own = [select_faces([name.split()[-1]], [name.rpartition(" ")[0]]) for name in cls.classes]
        positions: dict[Part, tuple[int, ...]] = {
            "train": (0, 2, 4),
            "validation": (3,),
            "test": (1,),
        }  # of five
        parts = {part: [code for i, code in enumerate(codes) if i % 5 in positions[part]] for part in PARTS}
        return {part: tuple(_combine(of_class, parts[part]) for of_class in own) for part in PARTS}


def _name(code: int) -> str:
    return unicodedata.name(chr(code), "")


SHIPPED: tuple[type[GlyphTask], ...] = tuple(
    task
    for name, task in list(globals().items())
    if isinstance(task, type) and issubclass(task, GlyphTask) and task is not GlyphTask and name[0] != "_"
)
"""Every task of this file: what they validate and test on stays out of pre-training."""
