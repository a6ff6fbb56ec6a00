"""How a language model is shown a text task, and asked: what a user sets, and nothing that reads a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mergekit_lab.ranges import require_choice, require_whole
from mergekit_lab.tasks import TextTask

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a model is shown a text task, and asked.

    Args:
        prompt: "chat" shows the task's prompt as a user's message by the tokenizer's chat template, "plain" as
            it is.
        max_length: tokens of prompt and answer together, at least 8. What is longer is cut, and counted:
            answers to half of it, at their end; then prompts, inside their template.
        cut: which end of a long prompt goes, "start" or "end".
        loss_on: "answer", or "all" (decoder-only models): the prompt's tokens too.
        group_by_length: batches of training hold samples of about one length.
        packing: (decoder-only models) rows of training hold several samples, of up to `max_length` tokens
            together, that see themselves alone: the same loss with less padding. There is little to gain where
            lengths are alike, or `group_by_length` makes them so.
        answering: "choices" takes the likeliest of a task's choices, "generate" decodes greedily; "auto"
            chooses where there are choices.
        precision: of evaluation: "bfloat16" by autocast, or "float32". Weights that are kept in bfloat16
            compute in it either way. `training.precision` is that of training.

    Raises:
        InputError: a value out of range.
    """

    prompt: str = "chat"
    max_length: int = 1024
    cut: str = "start"
    loss_on: str = "answer"
    group_by_length: bool = True
    packing: bool = False
    answering: str = "auto"
    precision: str = "float32"

    def __post_init__(self) -> None:
        allowed = {
            "prompt": ("chat", "plain"),
            "cut": ("start", "end"),
            "loss_on": ("answer", "all"),
            "answering": ("auto", "choices", "generate"),
            "precision": tuple(DTYPES),
        }
        for name, values in allowed.items():
            require_choice(f"backbone.{name}", getattr(self, name), values)
        require_whole("backbone.max_length", self.max_length, 8)

    def chooses(self, task: TextTask) -> bool:
        """Whether answers are chosen among the task's choices."""
        return self.answering == "choices" or (self.answering == "auto" and task.choices is not None)
