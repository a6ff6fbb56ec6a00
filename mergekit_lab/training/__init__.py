"""Fine-tune an image encoder on one task, or on several at once, with Lightning."""

from mergekit_lab.training.data import StepBatches, TaskData
from mergekit_lab.training.fit import Finetuned, Settings, finetune
from mergekit_lab.training.module import FinetuneModule

__all__ = ["FinetuneModule", "Finetuned", "Settings", "StepBatches", "TaskData", "finetune"]
