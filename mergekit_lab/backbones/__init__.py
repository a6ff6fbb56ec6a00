"""Pretrained models to fine-tune, how they learn a task, and what of them trains."""

from .classification import Classifier, ImageObjective
from .clip_layouts import as_image_tower, from_transformers, to_transformers
from .image_encoder import ImageEncoder
from .language import LanguageModel
from .linearised import Linearised, Tangent, linearised_model
from .lora import LoRA
from .objective import Backbone, Batch, Objective
from .open_clip import OpenClip
from .parametrisation import AttentionLinear, Full, Parametrisation
from .text_encoder import TextEncoder

__all__ = [
    "AttentionLinear",
    "Backbone",
    "Batch",
    "Classifier",
    "Full",
    "ImageEncoder",
    "ImageObjective",
    "LanguageModel",
    "Linearised",
    "LoRA",
    "Objective",
    "OpenClip",
    "Parametrisation",
    "Tangent",
    "TextEncoder",
    "as_image_tower",
    "from_transformers",
    "linearised_model",
    "to_transformers",
]
