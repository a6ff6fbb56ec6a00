"""Glyph bitmaps from the fonts that matplotlib ships.

Faces are the 21 text faces of DejaVu, STIX and Computer Modern. Three kinds are left out: `LastResortHE`, which
draws a box for every code point; the STIX parts without Unicode names; and Computer Modern's `cmex`, `cmmi` and
`cmsy`, whose code points do not say what they draw. For the same reason only A-Z, a-z and 0-9 of Computer
Modern are used.

A bitmap is the clean, undistorted picture of one character in one face: uint8 `[40, 40]`, 255 = ink, the ink
centered. Bitmaps are compared by digest to show that no picture is in two parts.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mergekit_lab.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

CANVAS = 40
_EM = 26
_MARGIN = 2


@dataclass(frozen=True)
class Face:
    """One font file: `family` and `style` as captions name them, `file` without its ending."""

    family: str
    style: str
    file: str


def _list_faces(family: str, **files: str) -> tuple[Face, ...]:
    return tuple(Face(family, style.replace("_", " "), file) for style, file in files.items())


def _make_four(family: str, stem: str, regular: str, bold: str, italic: str, both: str) -> tuple[Face, ...]:
    files = {"regular": regular, "bold": bold, "italic": italic, "bold_italic": both}
    return _list_faces(family, **{style: stem + ending for style, ending in files.items()})


FACES: tuple[Face, ...] = (
    *_make_four("sans", "DejaVuSans", "", "-Bold", "-Oblique", "-BoldOblique"),
    *_make_four("serif", "DejaVuSerif", "", "-Bold", "-Italic", "-BoldItalic"),
    *_make_four("monospace", "DejaVuSansMono", "", "-Bold", "-Oblique", "-BoldOblique"),
    *_make_four("times", "STIXGeneral", "", "Bol", "Italic", "BolIta"),
    *_list_faces("roman", regular="cmr10", bold="cmb10", italic="cmti10"),
    *_list_faces("grotesque", regular="cmss10"),
    *_list_faces("typewriter", regular="cmtt10"),
)
FAMILIES: tuple[str, ...] = tuple(dict.fromkeys(face.family for face in FACES))

_BASIC = frozenset(map(ord, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"))


def select_faces(families: Iterable[str] = FAMILIES, styles: Iterable[str] | None = None) -> tuple[Face, ...]:
    """Select the faces of these families (and styles), in the order of `FACES`."""
    wanted = set(families)
    allowed = None if styles is None else set(styles)
    return tuple(f for f in FACES if f.family in wanted and (allowed is None or f.style in allowed))


def _find_file(face: Face) -> Path:
    try:
        import matplotlib
    except ImportError as error:
        raise InputError(
            "rendered tasks draw their glyphs from matplotlib's fonts, and matplotlib is missing: "
            "pip install mergekit_lab[demo]"
        ) from error
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face.file}.ttf"


@cache
def list_characters(face: Face) -> frozenset[int]:
    """The code points for which `face` draws the right character."""
    path = _find_file(face)
    from matplotlib.ft2font import FT2Font

    codes = frozenset(FT2Font(str(path)).get_charmap())
    return codes & _BASIC if face.file.startswith("cm") else codes


@cache
def _open_font(face: Face, size: int):  # type: ignore[no-untyped-def]
    from PIL import ImageFont

    return ImageFont.truetype(str(_find_file(face)), size, layout_engine=ImageFont.Layout.BASIC)


def _draw_ink(face: Face, code: int, size: int, side: int) -> "Image | None":
    """The glyph cut to its ink, drawn at `size` on a sheet of `side` pixels; None where it has none."""
    from PIL import Image, ImageDraw

    sheet = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(sheet)
    draw.text((side // 3, side * 2 // 3), chr(code), font=_open_font(face, size), fill=255, anchor="ls")
    box = sheet.getbbox()
    return None if box is None else sheet.crop(box)


@cache
def draw_bitmap(face: Face, code: int) -> bytes | None:
    """The clean picture of code point `code` in `face`: `CANVAS²` bytes, row by row, 255 = ink.

    The ink is centered. A glyph too large for the canvas is drawn smaller until it fits. A character without
    ink, such as a space, gives None.
    """
    from PIL import Image

    room, size = CANVAS - 2 * _MARGIN, _EM
    ink = _draw_ink(face, code, size, 3 * CANVAS)
    if ink is not None and max(ink.size) > room:  # perhaps cut by the small sheet, which is the faster one
        ink = _draw_ink(face, code, size, 8 * CANVAS)
    while ink is not None and max(ink.size) > room and size > 5:
        size = min(size - 1, size * room // max(ink.size))
        ink = _draw_ink(face, code, size, 8 * CANVAS)
    if ink is None:
        return None
    picture = Image.new("L", (CANVAS, CANVAS), 0)
    picture.paste(ink, ((CANVAS - ink.width) // 2, (CANVAS - ink.height) // 2))
    return picture.tobytes()


@cache
def digest(face: Face, code: int) -> str | None:
    """SHA-256 (first 16 hex digits) of the clean bitmap, or None without ink."""
    data = draw_bitmap(face, code)
    return None if data is None else hashlib.sha256(data).hexdigest()[:16]


def stack(pairs: Sequence[tuple[Face, int]]) -> Tensor:
    """Clean bitmaps of `(face, code point)` pairs with ink, as uint8 `[N, CANVAS, CANVAS]`."""
    rows = [np.frombuffer(draw_bitmap(*pair) or b"", dtype=np.uint8) for pair in pairs]
    return torch.from_numpy(np.stack(rows)).reshape(-1, CANVAS, CANVAS)
