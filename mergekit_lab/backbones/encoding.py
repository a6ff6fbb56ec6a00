"""Prompts and answers as tokens: formatted by a template, cut to fit, answers ended; and the settings of that.

Legend: L tokens of a row.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.ranges import check_settings
from mergekit_lab.tasks import Part, TextTask

log = logging.getLogger(__name__)

_MARK, _BLANK = "\ue000", "\u2003"
"""A private character, and a rare white space, that stand for a prompt while its template is looked at."""
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_TODAY = date(2024, 7, 26)
"""What a template that tells the date tells, so that a prompt is the same whenever it is shown: what Llama 3's
falls back on."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a model reads a text task and answers.

    Args:
        prompt: "chat" formats the prompt as a user's message by the tokenizer's chat template; "plain" leaves
            it unchanged.
        max_length: tokens of prompt and answer together, at least 8. Longer ones are cut and counted: answers
            at their end to half of it, then prompts inside their template.
        cut: which end of a long prompt is cut, "start" or "end".
        loss_on: "answer", or "all" to include the prompt's tokens (decoder-only models).
        group_by_length: make training batches of samples of similar length.
        packing: put several samples into a training row of up to `max_length` tokens (decoder-only models). A
            sample sees only itself, so the loss is the same with less padding. It gains little if lengths are
            similar, also by `group_by_length`.
        answering: "choices" takes the likeliest of a task's choices, "generate" decodes greedily. "auto" takes
            "choices" if the task has some.
        precision: arithmetic of evaluation, "bfloat16" by autocast or "float32". Weights stored in bfloat16
            always compute in it. `training.precision` sets that of training.

    Raises:
        InputError: a value out of range.
    """

    prompt: Literal["chat", "plain"] = "chat"
    max_length: Annotated[int, Ge(8)] = 1024
    cut: Literal["start", "end"] = "start"
    loss_on: Literal["answer", "all"] = "answer"
    group_by_length: bool = True
    packing: bool = False
    answering: Literal["auto", "choices", "generate"] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self), "backbone.{}")

    def chooses(self, task: TextTask) -> bool:
        """Whether answers are chosen from the task's choices."""
        return self.answering == "choices" or (self.answering == "auto" and task.choices is not None)


@dataclass(frozen=True)
class Encoded:
    """One part's tokens.

    Attributes:
        prompts, answers: int64 `[L]` each.
        truncated: number of prompts and answers that were cut.
    """

    prompts: list[Tensor]
    answers: list[Tensor]
    truncated: tuple[int, int]

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(p) + len(a) for p, a in zip(self.prompts, self.answers, strict=True)])


@dataclass
class Encoding:
    """How texts become the tokens of one model.

    Args:
        tokenizer: of transformers, with a padding token.
        reading: how prompts are formatted and cut.
        causal: the answer follows the prompt in one row; else an encoder reads the prompt.
        positions: the most tokens of a row that the model accepts; None sets no limit.

    Raises:
        InputError: `reading` wants a chat template, and there is none that keeps the prompt's text.
    """

    tokenizer: Any
    reading: Reading
    causal: bool
    positions: int | None

    def __post_init__(self) -> None:
        self._template = self._look_at_template()

    def _look_at_template(self) -> tuple[str, str, bool]:
        """What stands before and after a prompt, and whether white space around it goes."""
        if self.reading.prompt == "plain":
            return "", "", False
        if not self.tokenizer.chat_template:
            raise InputError("this tokenizer has no chat template: set backbone.prompt=plain")
        template = _NOW.sub(lambda call: repr(_TODAY.strftime(call[2])), self.tokenizer.get_chat_template())
        if "strftime_now(" in template:
            raise InputError(
                "the chat template shows the time, so prompts would change: set backbone.prompt=plain"
            )
        prompt = f"{_BLANK}{_MARK}{_BLANK}"
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            chat_template=template, tokenize=False, add_generation_prompt=True,
        )  # fmt: skip
        trims = prompt not in text
        before, marker, after = text.partition(_MARK if trims else prompt)
        if not marker or {_MARK, _BLANK} & {*before, *after}:
            raise InputError(
                "the chat template does not keep a user's message unchanged: set backbone.prompt=plain"
            )
        return before, after, trims

    def encode_choices(self, task: TextTask) -> list[Tensor]:
        """The tokens of each choice, its end included.

        Raises:
            InputError: two choices have the same tokens, or one has none.
        """
        known: dict[tuple[int, ...], str] = {}
        texts = task.choices or ()
        choices = self.encode_answers(texts)
        for text, tokens in zip(texts, choices, strict=True):
            same = known.setdefault(tuple(tokens.tolist()), text)
            if same != text or len(tokens) == 0:
                raise InputError(
                    f"task {task.name!r}: this model's tokenizer turns "
                    + (f"the choices {same!r} and {text!r} into the same tokens" if same != text
                       else f"the choice {text!r} into no tokens")
                    + ": use other words"
                )  # fmt: skip
        return choices

    def encode_answers(self, texts: Sequence[str]) -> list[Tensor]:
        """The tokens of answers, the end-of-text token included."""
        end = self.tokenizer.eos_token_id
        last = torch.tensor([] if end is None else [end], dtype=torch.int64)
        return [torch.cat([tokens, last]) for tokens in self._tokenize(texts)]

    def encode(self, task: TextTask, part: Part) -> Encoded:
        """The tokens of a part. Logs how much was cut.

        Raises:
            InputError: a prompt has no tokens, there is no room for prompts, or rows are longer than the model
                accepts.
        """
        samples, most = task.load_samples(part), self.reading.max_length // 2
        whole = self.encode_answers(samples.answers)
        answers = [a[:most] for a in whole]
        shown, head, tail = self._show(samples.prompts)
        rooms = [self.reading.max_length - (len(a) if self.causal else 0) for a in answers]
        self._check(task, part, shown, rooms, head + tail)
        prompts = [self._fit(p, head, tail, room) for p, room in zip(shown, rooms, strict=True)]
        cut = sum(len(p) > room for p, room in zip(shown, rooms, strict=True))
        encoded = Encoded(prompts, answers, (cut, sum(len(a) > most for a in whole)))
        if any(encoded.truncated):
            log.info(
                "%s, %s: %d of %d prompts and %d answers were cut to %d tokens",
                task.name, part, cut, len(samples), encoded.truncated[1], self.reading.max_length,
            )  # fmt: skip
        unknown = self.tokenizer.unk_token_id
        odd = 0 if unknown is None else sum(bool((a == unknown).any()) for a in answers)
        if odd:
            log.warning(
                "%s, %s: %d of %d answers have characters that this model's tokenizer does not know, so it "
                "cannot answer them", task.name, part, odd, len(samples),
            )  # fmt: skip
        self._check_positions(task, part, encoded)
        return encoded

    def _check(
        self, task: TextTask, part: Part, shown: Sequence[Tensor], rooms: Sequence[int], template: int
    ) -> None:
        empty = next((position for position, tokens in enumerate(shown) if len(tokens) == 0), None)
        if empty is not None:
            raise InputError(
                f"task {task.name!r}: prompt {empty + 1} of {part} is empty, and backbone.prompt=plain adds "
                "nothing: remove such rows from the data, or set backbone.prompt=chat"
            )
        least = min(rooms)
        if any(len(p) > room <= template for p, room in zip(shown, rooms, strict=True)):
            raise InputError(
                f"backbone.max_length={self.reading.max_length} leaves {least} tokens for a prompt of "
                f"{task.name}, but its template alone takes {template}: raise it"
            )

    def _check_positions(self, task: TextTask, part: Part, encoded: Encoded) -> None:
        if self.positions is None:
            return
        says = 0 if self.reading.chooses(task) else task.max_new_tokens
        read = [len(p) for p in encoded.prompts]
        answered = [max(len(a), says) for a in encoded.answers]
        rows = [sum(pair) for pair in zip(read, answered, strict=True)] if self.causal else [*read, *answered]
        longest = max(rows)
        if longest > self.positions:
            raise InputError(
                f"task {task.name!r}: rows of {part} with their answers take up to {longest} tokens, and this "
                f"model has {self.positions} positions: lower backbone.max_length"
            )

    def _tokenize(self, texts: Sequence[str], special: bool = False) -> list[Tensor]:
        """Of each text, all in one call, which tokenizers are made for; without an end-of-text token."""
        rows: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=special).input_ids
        end = self.tokenizer.eos_token_id
        if special:
            rows = [ids[:-1] if ids and ids[-1] == end else ids for ids in rows]
        return [torch.tensor(ids, dtype=torch.int64) for ids in rows]

    def _show(self, prompts: Sequence[str]) -> tuple[list[Tensor], int, int]:
        """The tokens of prompts, and how many the template has before and after each, which are never cut.

        An encoder is shown the end-of-text token that it has learned to see, where the tokenizer puts one.
        """
        if not self.causal:
            rows = [torch.tensor(ids, dtype=torch.int64) for ids in self.tokenizer(list(prompts)).input_ids]
            ends = len(rows[0]) > 0 and int(rows[0][-1]) == self.tokenizer.eos_token_id
            return rows, 0, int(ends)
        before, after, trims = self._template
        special = self.reading.prompt == "plain"
        head = len(self._tokenize([before], special)[0])
        tail = len(self._tokenize([after])[0]) if after else 0
        texts = [before + (text.strip() if trims else text) + after for text in prompts]
        return self._tokenize(texts, special), head, tail

    def _fit(self, tokens: Tensor, head: int, tail: int, room: int) -> Tensor:
        """A prompt's tokens, cut inside its template if there are more than `room`."""
        if len(tokens) <= room:
            return tokens
        inside, end = room - head - tail, len(tokens) - tail
        kept = tokens[head : head + inside] if self.reading.cut == "end" else tokens[end - inside : end]
        return torch.cat([tokens[:head], kept, tokens[end:]])
