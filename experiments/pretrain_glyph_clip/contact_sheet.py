"""Draw the contact sheet of the eight shipped tasks: one row a task, test images.

python experiments/pretrain_glyph_clip/contact_sheet.py
"""

from pathlib import Path

import torch
from PIL import Image, ImageDraw

from mergekit_lab import tasks as rooms

OUT = Path(__file__).resolve().parents[2] / "docs" / "images" / "glyphs8.png"
NAMES = ("Digits", "Mnist", "Latin", "Greek", "Cyrillic", "Math", "Accents", "Style")
SIDE, COLUMNS, MARGIN = 64, 12, 76


def main() -> None:
    sheet = Image.new("RGB", (MARGIN + SIDE * COLUMNS, SIDE * len(NAMES)), "white")
    for row, name in enumerate(NAMES):
        task = getattr(rooms, name)()
        ImageDraw.Draw(sheet).text((6, SIDE * row + SIDE // 2 - 6), task.name, fill="black")
        pixels = torch.cat(list(task.load_samples("test").images[:COLUMNS]), 2).permute(1, 2, 0)
        strip = Image.fromarray(pixels.numpy()).resize((SIDE * COLUMNS, SIDE), Image.Resampling.NEAREST)
        sheet.paste(strip, (MARGIN, SIDE * row))
    sheet.quantize(200).save(OUT, optimize=True)


if __name__ == "__main__":
    main()
