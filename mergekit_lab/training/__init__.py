"""Fine-tune a model on one task, or on several at once, with Lightning.

Lightning takes seconds to import. Only modules that train import it, not those that plan a training.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mergekit_lab.training.settings import TrainingSettings

if TYPE_CHECKING:
    from mergekit_lab.training.clock import TrainingCost
    from mergekit_lab.training.data import StepBatches
    from mergekit_lab.training.fit import finetune
    from mergekit_lab.training.module import FinetuneModule

_LATER = {"TrainingCost": "clock", "StepBatches": "data", "finetune": "fit", "FinetuneModule": "module"}

__all__ = ["FinetuneModule", "StepBatches", "TrainingCost", "TrainingSettings", "finetune"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
