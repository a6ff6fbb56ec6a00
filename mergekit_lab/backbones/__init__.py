"""Pretrained models to fine-tune: image encoders and the frozen heads that score their features."""

from .open_clip import Classifier, ImageEncoder, OpenClip

__all__ = ["Classifier", "ImageEncoder", "OpenClip"]
