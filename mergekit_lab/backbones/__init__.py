"""Pretrained models to fine-tune: image encoders, frozen heads for their features, and what of them trains."""

from .linearised import Linearised, Tangent, linearised_model
from .lora import LoRA
from .open_clip import Classifier, ImageEncoder, OpenClip
from .parametrisation import AttentionLinear, Full, Parametrisation

__all__ = [
    "AttentionLinear",
    "Classifier",
    "Full",
    "ImageEncoder",
    "Linearised",
    "LoRA",
    "OpenClip",
    "Parametrisation",
    "Tangent",
    "linearised_model",
]
