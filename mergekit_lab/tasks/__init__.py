"""Tasks to learn. Each has three parts: images with class names, or prompts with answers."""

from .arithmetic import WordProblems
from .checks import DataCheck, check_task
from .crops import draw_boxes
from .decoding import Packed
from .glyph_tasks import Accents, Cyrillic, GlyphTask, Greek, Latin, Math, Style
from .handwriting import Digits, Handwriting, Mnist
from .harness import HarnessTask
from .images import HubImages, Keeper
from .messages import Messages
from .pretraining import find_held_out
from .task import PARTS, ImageSamples, ImageTask, Part, Task, count_shared_images, digest_images
from .text import TextFile, TextSamples, TextTask

__all__ = [
    "PARTS",
    "Accents",
    "Cyrillic",
    "DataCheck",
    "Digits",
    "GlyphTask",
    "Greek",
    "Handwriting",
    "HarnessTask",
    "HubImages",
    "ImageSamples",
    "ImageTask",
    "Keeper",
    "Latin",
    "Math",
    "Messages",
    "Mnist",
    "Packed",
    "Part",
    "Style",
    "Task",
    "TextFile",
    "TextSamples",
    "TextTask",
    "WordProblems",
    "check_task",
    "count_shared_images",
    "digest_images",
    "draw_boxes",
    "find_held_out",
]
