"""Pretrained models to fine-tune, how they learn a task, and which of their weights train."""

from .classification import Classifier, ImageEncoder, ImageObjective
from .clip_layouts import as_image_tower, from_transformers, to_transformers
from .language import LanguageModel
from .linearized import Linearized, Tangent, linearize
from .lora import LoRA
from .objective import Backbone, Objective
from .open_clip import OpenClip
from .parametrization import AttentionLinear, Full, Parametrization
from .text_encoder import TextEncoder

__all__ = [
    "AttentionLinear",
    "Backbone",
    "Classifier",
    "Full",
    "ImageEncoder",
    "ImageObjective",
    "LanguageModel",
    "Linearized",
    "LoRA",
    "Objective",
    "OpenClip",
    "Parametrization",
    "Tangent",
    "TextEncoder",
    "as_image_tower",
    "from_transformers",
    "linearize",
    "to_transformers",
]
