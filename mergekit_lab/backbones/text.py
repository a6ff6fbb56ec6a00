"""Text tasks for language models: losses on answers, answers chosen or decoded.

Legend: N samples, L tokens of a row, V vocabulary, C choices, B tokens of all choices together.

Answers end with the tokenizer's end-of-text token, which is learned and scored like any other. A choice's score
is the log-likelihood of all its tokens, so a choice that begins another one has no advantage.
"""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mergekit_lab.backbones.decoding import decode, unwrap_model
from mergekit_lab.backbones.encoding import Encoded, Encoding, Reading
from mergekit_lab.backbones.linearized import Tangent
from mergekit_lab.backbones.objective import Objective, find_device
from mergekit_lab.backbones.rows import mask_reach, mask_segments, pack_first_fit, pad_rows, round_up
from mergekit_lab.batches import IGNORED, Batch
from mergekit_lab.errors import InputError
from mergekit_lab.tasks import Part, TextTask
from mergekit_lab.tasks.metrics import MEANS, METRICS

log = logging.getLogger(__name__)

_TOKENS, _LOGITS, _ROWS = 1 << 16, 1 << 29, 512
"""What one forward pass of an evaluation may hold: tokens, entries of logits, rows of a decoder."""


class ScoredText(Objective):
    """A text task with text answers, scored by its metric and by both accuracies.

    Args:
        task: prompts and answers.
        tokenizer: of transformers, with a padding token.
    """

    task: TextTask

    def __init__(self, task: TextTask, tokenizer: Any) -> None:
        super().__init__(task)
        self.tokenizer = tokenizer
        self.choices = task.choices or ()
        self._pad = int(tokenizer.pad_token_id)

    def score_samples(self, predictions: Sequence[Any], part: Part, index: Tensor) -> Sequence[float] | None:
        if self.task.metric not in MEANS:
            return None
        samples, score = self.task.load_samples(part), METRICS[self.task.metric]
        return [
            score([prediction], [samples.answers[i]], [samples.prompts[i]])
            for prediction, i in zip(predictions, index.tolist(), strict=True)
        ]

    def measure(self, predictions: Sequence[Any], part: Part, index: Tensor) -> dict[str, float]:
        samples, positions = self.task.load_samples(part), index.tolist()
        references, sources = [samples.answers[i] for i in positions], [samples.prompts[i] for i in positions]
        names = dict.fromkeys((self.task.metric, "accuracy", "lenient_accuracy"))
        return {name: METRICS[name](predictions, references, sources) for name in names}


class TextObjective(ScoredText):
    """A text task for a language model.

    Args:
        task, tokenizer: see `ScoredText`.
        reading: how prompts are formatted and cut, and how the model answers.
        positions: the most tokens of a row that the model accepts; None sets no limit.

    Raises:
        InputError: the tokenizer gives two choices the same tokens.
    """

    def __init__(self, task: TextTask, tokenizer: Any, reading: Reading, positions: int | None = None) -> None:
        super().__init__(task, tokenizer)
        self.reading = reading
        self.positions = positions
        self._encoded: dict[Part, Encoded] = {}
        self._encoding = Encoding(tokenizer, reading, self.causal, positions)
        self._choices = self._encoding.encode_choices(task) if self.choices else []

    def encode(self, part: Part) -> Encoded:
        """The tokens of a part, made once per process."""
        if part not in self._encoded:
            self._encoded[part] = self._encoding.encode(self.task, part)
        return self._encoded[part]

    def measure_lengths(self, part: Part) -> Tensor | None:
        return self.encode(part).lengths if self.reading.group_by_length else None

    def predict(self, model: nn.Module, part: Part, index: Tensor) -> list[str]:
        encoded = self.encode(part)
        prompts = [encoded.prompts[i] for i in index.tolist()]
        device = find_device(model)
        answers: list[str] = []
        with torch.autocast(device.type, torch.bfloat16, enabled=self.reading.precision == "bfloat16"):
            for few in self._split_by_memory(model, prompts):
                if self.reading.chooses(self.task):
                    best = self.score_choices(model, few).argmax(dim=1).tolist()
                    answers += [self.choices[i] for i in best]
                else:
                    answers += self._generate(model, few)
        return answers

    def _split_by_memory(self, model: nn.Module, prompts: list[Tensor]) -> Iterable[list[Tensor]]:
        """Prompts in parts that one forward pass can hold.

        What decodes with a cache makes the logits of one token at a time, what has none those of a whole row.
        """
        longest = max(len(p) for p in prompts)
        if self.reading.chooses(self.task):
            block = sum(map(len, self._choices))
            computed = block + 1
        else:
            block = self.task.max_new_tokens
            computed = 1 if hasattr(model, "generate") else longest + block
        rows = min(_TOKENS // (longest + block), _LOGITS // (len(self.tokenizer) * computed))
        size = max(1, rows)
        return (prompts[i : i + size] for i in range(0, len(prompts), size))

    @abstractmethod
    def score_choices(self, model: nn.Module, prompts: list[Tensor]) -> Tensor:
        """log p(choice | prompt), summed over the choice's tokens, `[N, C]`."""

    def _generate(self, model: nn.Module, prompts: list[Tensor]) -> list[str]:
        """Greedy answers."""
        tokens, mask = pad_rows(prompts, self._pad, find_device(model), left=self.causal)
        new = decode(
            model, tokens, mask, max_new_tokens=self.task.max_new_tokens,
            end=self.tokenizer.eos_token_id, pad=self._pad,
        )  # fmt: skip
        texts: list[str] = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts


class CausalObjective(TextObjective):
    """For decoder-only models: the answer follows the prompt in one row.

    Attributes:
        packed: samples, and the training rows that packing has put them into so far.
        padded: tokens, and the positions that `fix_shape` has padded them to so far.
    """

    causal = True
    packed = padded = (0, 0)

    def _read_row(self, part: Part, position: int) -> tuple[Tensor, Tensor]:
        """A sample's tokens, and the labels at them."""
        encoded = self.encode(part)
        prompt, answer = encoded.prompts[position], encoded.answers[position]
        silent = prompt if self.reading.loss_on == "all" else torch.full_like(prompt, IGNORED)
        return torch.cat([prompt, answer]), torch.cat([silent, answer])

    def make_batch(self, part: Part, index: Tensor) -> Batch:
        rows, labels = zip(*(self._read_row(part, i) for i in index.tolist()), strict=True)
        tokens, mask = pad_rows(rows, self._pad)
        return {"input_ids": tokens, "attention_mask": mask, "labels": pad_rows(labels, IGNORED)[0]}

    def make_training_batch(self, index: Tensor) -> Batch:
        """With packing, a row holds several samples, numbered from 1 in `segments`. 0 is padding."""
        if not self.reading.packing:
            return self.make_batch("train", index)
        samples = [self._read_row("train", i) for i in index.tolist()]
        bins = pack_first_fit([len(tokens) for tokens, _ in samples], self.reading.max_length)
        if self.packed == (0, 0):
            log.info("%s: %d samples of the first batch in %d rows", self.task.name, len(samples), len(bins))
        self.packed = (self.packed[0] + len(samples), self.packed[1] + len(bins))
        rows: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "segments": [], "position_ids": []}
        for members in bins:
            tokens, labels = zip(*(samples[i] for i in members), strict=True)
            for label in labels:
                label[0] = IGNORED  # no token of its own sample comes before it
            rows["input_ids"].append(torch.cat(tokens))
            rows["labels"].append(torch.cat(labels))
            rows["segments"].append(torch.cat([torch.full_like(t, n) for n, t in enumerate(tokens, start=1)]))
            rows["position_ids"].append(torch.cat([torch.arange(len(t)) for t in tokens]))
        empty = {"input_ids": self._pad, "labels": IGNORED}
        return {name: pad_rows(parts, empty.get(name, 0))[0] for name, parts in rows.items()}

    @property
    def fixes_shapes(self) -> bool:  # type: ignore[override]
        return not self.reading.packing

    def fix_shape(self, batch: Any) -> Batch:
        """Pad rows at their end to one of a few lengths, and labels to one of a few numbers of positions.

        Rows need no mask, because only padding sees padding at the end. `columns` has the positions, the same
        in every row, filled up with positions without a label.
        """
        labels = batch["labels"]
        room = round_up(labels.shape[1])
        extra = min(room, self.positions or room) - labels.shape[1]
        used = (labels[:, 1:] != IGNORED).any(dim=0)
        length = labels.shape[1] - 1 + extra
        used = functional.pad(used, (0, extra), value=False)
        count = min(round_up(int(used.sum())), length)
        tokens, positions = self.padded
        self.padded = (tokens + int(batch["attention_mask"].sum()), positions + len(labels) * (length + 1))
        columns = (~used).to(torch.uint8).argsort(stable=True)[:count].sort().values
        return {
            "input_ids": functional.pad(batch["input_ids"], (0, extra), value=self._pad),
            "labels": functional.pad(labels, (0, extra), value=IGNORED),
            "columns": columns.expand(len(labels), -1).contiguous(),
        }

    def count_items(self, batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != IGNORED).sum().clamp_min(1)

    def compute_loss(self, model: nn.Module, batch: Any, *, label_smoothing: float = 0.0) -> Tensor:
        labels = batch["labels"][:, 1:]
        used = batch["columns"][0] if "columns" in batch else (labels != IGNORED).any(dim=0).nonzero().flatten()
        inputs = {name: t for name, t in batch.items() if name not in ("labels", "segments", "columns")}
        if "segments" in batch:
            if batch["segments"].shape[1] > mask_reach(unwrap_model(model)):
                raise InputError(
                    f"backbone.packing=true puts texts into rows of up to {self.reading.max_length} tokens, in "
                    f"which {type(unwrap_model(model)).__name__} would let them see each other: set it to false"
                )
            inputs["attention_mask"] = mask_segments(batch["segments"])
        logits = _compute_logits(model, used, **inputs)
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), labels[:, used].flatten(),
            ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing,
        )  # fmt: skip

    def score_choices(self, model: nn.Module, prompts: list[Tensor]) -> Tensor:
        """Score all choices of a prompt in one row after it. A choice sees only the prompt and itself.

        This takes one forward pass of L + B tokens per prompt. Models that do not obey our mask need C passes,
        with one choice each.
        """
        device = find_device(model)
        tokens, mask = pad_rows(prompts, self._pad, device, left=True)
        if tokens.shape[1] + sum(map(len, self._choices)) > mask_reach(unwrap_model(model)):
            return self._score_each_choice(model, tokens, mask)
        block = torch.cat([c[:-1] for c in self._choices]).to(device)
        owner = torch.cat([torch.full((len(c) - 1,), j) for j, c in enumerate(self._choices)]).to(device)
        offset = torch.cat([torch.arange(len(c) - 1) for c in self._choices]).to(device)
        count, length, extra = len(prompts), tokens.shape[1], len(block)
        sees = torch.zeros(count, 1, length + extra, length + extra, dtype=torch.bool, device=device)
        sees[:, 0, :length, :length] = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        sees[:, 0, :, :length] &= mask[:, None, :].bool()
        sees[:, 0, length:, :length] = mask[:, None, :].bool()
        sees[:, 0, length:, length:] = (owner[:, None] == owner) & (offset[:, None] >= offset)
        every = torch.arange(length, device=device)
        sees[:, 0, every, every] = True  # a row of padding that saw nothing would be no number
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        positions = torch.cat([positions, mask.sum(dim=1, keepdim=True) + offset], dim=1)
        row = torch.cat([tokens, block.expand(count, extra)], dim=1)
        used = torch.arange(length - 1, length + extra, device=device)
        logits = _compute_logits(model, used, input_ids=row, attention_mask=sees, position_ids=positions)
        return self._sum_choices(logits)

    def _score_each_choice(self, model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
        """The same, a row for each prompt and choice; `tokens` and `mask` of prompts, padded at their start."""
        counts = "position_ids" in inspect.signature(unwrap_model(model).forward).parameters
        scores = []
        for choice in self._choices:
            choice = choice.to(tokens.device)
            row = torch.cat([tokens, choice.expand(len(tokens), -1)], dim=1)
            seen = functional.pad(mask, (0, len(choice)), value=1)
            positions = {"position_ids": (seen.cumsum(dim=1) - 1).clamp_min(0)} if counts else {}
            used = torch.arange(tokens.shape[1] - 1, row.shape[1] - 1, device=row.device)
            logits = _compute_logits(model, used, input_ids=row, attention_mask=seen, **positions)
            losses = functional.cross_entropy(
                logits.float().transpose(1, 2), choice.expand(len(tokens), -1), reduction="none"
            )
            scores.append(-losses.sum(dim=1))
        return torch.stack(scores, dim=1)

    def _sum_choices(self, logits: Tensor) -> Tensor:
        """`[N, C]` from the logits `[N, 1 + B, V]` after the prompt and each choice's tokens but the last."""
        whole = logits.float().logsumexp(dim=2)
        scores, start = [], 1
        for choice in self._choices:
            inner = len(choice) - 1
            positions = torch.tensor([0, *range(start, start + inner)], device=logits.device)
            picked = logits[:, positions, choice.to(logits.device)].float() - whole[:, positions]
            scores.append(picked.sum(dim=1))
            start += inner
        return torch.stack(scores, dim=1)


class Seq2SeqObjective(TextObjective):
    """For encoder-decoder models: the encoder reads the prompt, the decoder learns the answer."""

    def make_batch(self, part: Part, index: Tensor) -> Batch:
        encoded, positions = self.encode(part), index.tolist()
        tokens, mask = pad_rows([encoded.prompts[i] for i in positions], self._pad)
        labels, _ = pad_rows([encoded.answers[i] for i in positions], IGNORED)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    def count_items(self, batch: Any) -> Tensor:
        return (batch["labels"] != IGNORED).sum().clamp_min(1)

    def compute_loss(self, model: nn.Module, batch: Any, *, label_smoothing: float = 0.0) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**inputs, decoder_input_ids=_shift(model, batch["labels"])).logits
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["labels"].flatten(),
            ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing,
        )  # fmt: skip

    def score_choices(self, model: nn.Module, prompts: list[Tensor]) -> Tensor:
        """The encoder reads a prompt once, and the decoder scores all its choices.

        A linearized model reads a prompt once per choice, because it expands encoder and decoder together.
        """
        from transformers.modeling_outputs import BaseModelOutput

        device = find_device(model)
        tokens, mask = pad_rows(prompts, self._pad, device)
        whole = isinstance(model, Tangent)
        first = torch.full_like(tokens[:, :1], self._pad)
        read = (
            tokens if whole  # the whole model is called, for its weights may be spread
            else model(input_ids=tokens, attention_mask=mask, decoder_input_ids=first).encoder_last_hidden_state
        )  # fmt: skip
        labels, _ = pad_rows(self._choices, IGNORED, device)
        count = len(self._choices)
        size = max(1, _ROWS // count)
        scores = []
        for state, seen in zip(read.split(size), mask.split(size), strict=True):
            every = labels.repeat(len(state), 1)
            state = state.repeat_interleave(count, dim=0)
            logits = model(
                **{"input_ids": state} if whole else {"encoder_outputs": BaseModelOutput(state)},
                attention_mask=seen.repeat_interleave(count, dim=0),
                decoder_input_ids=_shift(model, every),
            ).logits.float()
            losses = functional.cross_entropy(
                logits.transpose(1, 2), every, ignore_index=IGNORED, reduction="none"
            )
            scores.append(-losses.sum(dim=1).view(len(seen), count))
        return torch.cat(scores)


def _shift(model: nn.Module, labels: Tensor) -> Tensor:
    """What a decoder reads where `labels` are wanted of it, as the model itself shifts them."""
    shifted: Tensor = unwrap_model(model).prepare_decoder_input_ids_from_labels(labels=labels)
    return shifted


def _compute_logits(model: nn.Module, used: Tensor, **inputs: Tensor) -> Tensor:
    """The logits at some positions of every row, `[N, len(used), V]`; others are left out where possible."""
    keeps = "logits_to_keep" in inspect.signature(unwrap_model(model).forward).parameters
    logits: Tensor = model(**inputs, use_cache=False, **({"logits_to_keep": used} if keeps else {})).logits
    return logits if keeps else logits[:, used]
