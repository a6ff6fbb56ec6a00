"""Fine-tune a model on one task, or on several at once, with Lightning."""

from mergekit_lab.training.cost import TrainingCost
from mergekit_lab.training.data import StepBatches, TaskData
from mergekit_lab.training.fit import Finetuned, finetune
from mergekit_lab.training.module import FinetuneModule
from mergekit_lab.training.settings import TrainingSettings

__all__ = [
    "FinetuneModule",
    "Finetuned",
    "StepBatches",
    "TaskData",
    "TrainingCost",
    "TrainingSettings",
    "finetune",
]
