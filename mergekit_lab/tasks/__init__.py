"""What to learn: classification tasks with class names, prompt templates and three parts each."""

from .glyph_tasks import Accents, Cyrillic, GlyphTask, Greek, Latin, Math, Style
from .handwriting import Digits, Handwriting, Mnist
from .pretraining import held_out
from .task import PARTS, Part, Split, Task, image_digests, shared_images

__all__ = [
    "PARTS",
    "Accents",
    "Cyrillic",
    "Digits",
    "GlyphTask",
    "Greek",
    "Handwriting",
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
