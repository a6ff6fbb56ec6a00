"""What to learn: tasks of three parts each, of images with class names or of prompts with answers."""

from .arithmetic import WordProblems
from .checks import DataCheck, check_task
from .crops import random_boxes, resized
from .decoding import Packed
from .glyph_tasks import Accents, Cyrillic, GlyphTask, Greek, Latin, Math, Style
from .handwriting import Digits, Handwriting, Mnist
from .images import HubImages, Keeper
from .pretraining import held_out
from .task import PARTS, ImageTask, Part, Split, Task, image_digests, shared_images
from .text import TextFile, TextSplit, TextTask

__all__ = [
    "PARTS",
    "Accents",
    "Cyrillic",
    "DataCheck",
    "Digits",
    "GlyphTask",
    "Greek",
    "Handwriting",
    "HubImages",
    "ImageTask",
    "Keeper",
    "Latin",
    "Math",
    "Mnist",
    "Packed",
    "Part",
    "Split",
    "Style",
    "Task",
    "TextFile",
    "TextSplit",
    "TextTask",
    "WordProblems",
    "check_task",
    "held_out",
    "image_digests",
    "random_boxes",
    "resized",
    "shared_images",
]
