"""What to learn: tasks of three parts each, of images with class names."""

from .glyph_tasks import Accents, Cyrillic, GlyphTask, Greek, Latin, Math, Style
from .handwriting import Digits, Handwriting, Mnist
from .pretraining import held_out
from .task import PARTS, ImageTask, Part, Split, Task, image_digests, shared_images

__all__ = [
    "PARTS",
    "Accents",
    "Cyrillic",
    "Digits",
    "GlyphTask",
    "Greek",
    "Handwriting",
    "ImageTask",
    "Latin",
    "Math",
    "Mnist",
    "Part",
    "Split",
    "Style",
    "Task",
    "held_out",
    "image_digests",
    "shared_images",
]
