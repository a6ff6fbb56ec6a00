"""Pretrained models to fine-tune, how they learn a task, and what of them trains."""

from .classification import Classifier, ImageObjective
from .linearised import Linearised, Tangent, linearised_model
from .lora import LoRA
from .objective import Backbone, Batch, Objective
from .open_clip import ImageEncoder, OpenClip
from .parametrisation import AttentionLinear, Full, Parametrisation

__all__ = [
    "AttentionLinear",
    "Backbone",
    "Batch",
    "Classifier",
    "Full",
    "ImageEncoder",
    "ImageObjective",
    "Linearised",
    "LoRA",
    "Objective",
    "OpenClip",
    "Parametrisation",
    "Tangent",
    "linearised_model",
]
