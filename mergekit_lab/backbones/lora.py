"""Low-rank adapters by peft. They are folded into dense weights after training, so any merger takes them.

Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models (ICLR 2022): W + (alpha / rank) B A, B = 0 at the
start. `checkpoints/adapters.py` folds adapters that were trained elsewhere.
"""

import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mergekit_lab.backbones.attention import list_attention_weights
from mergekit_lab.backbones.parametrization import Parametrization
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.ranges import Count, Rate, check_settings


@dataclass(frozen=True)
class LoRA(Parametrization):
    """Train low-rank factors. The expert is the base plus their product.

    Args:
        rank: the factors' rank, at least 1.
        alpha: the product is scaled by alpha / rank; positive.
        targets: modules to adapt, by the ends of their names as in peft. None takes attention's query, key,
            value and output projections.

    Raises:
        InputError: a number is out of range; when applied, the model lacks a target.
    """

    takes_sharded: ClassVar[bool] = False

    rank: Count = 16
    alpha: Rate = 16.0
    targets: list[str] | None = None

    def __post_init__(self) -> None:
        check_settings(LoRA, vars(self), "finetuning.{}")
        if self.targets is not None and not self.targets:
            raise InputError("finetuning.targets is empty: name modules, or leave it null for attention")

    def make_trainable(self, model: nn.Module, seed: int = 0) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        targets = _list_attention_modules(model) if self.targets is None else list(self.targets)
        _refuse_inner_projections(model, targets)
        options: dict[str, Any] = {"r": self.rank, "lora_alpha": self.alpha, "target_modules": targets}
        config = LoraConfig(**options)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # peft with transformers 5
            torch.manual_seed(seed)
            try:
                return get_peft_model(model, config)
            except ValueError as error:
                raise InputError(f"finetuning=lora cannot be applied: {error}") from None

    def fold(self, model: nn.Module) -> dict[str, Tensor]:
        with warnings.catch_warnings():  # transformers 5 believes Flan-T5's tied, which are not
            warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
            merged = deepcopy(model).merge_and_unload()  # type: ignore[operator]
        return dict(merged.state_dict())


def _list_attention_modules(model: nn.Module) -> list[str]:
    """Modules that hold the projections of attention: torch's own attention whole, else each linear layer."""
    whole = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    single = [
        name.removesuffix(".weight")
        for name in list_attention_weights(model)
        if not any(name.startswith(f"{module}.") for module in whole)
    ]
    if not whole and not single:
        raise InputError(
            f"finetuning=lora adapts attention by default, and {type(model).__name__} has none with a known "
            "name: name modules in finetuning.targets"
        )
    return whole + single


def _refuse_inner_projections(model: nn.Module, targets: list[str]) -> None:
    """torch's attention reads its output projection's weights without calling it: it would miss an adapter."""

    def is_named(module: str) -> bool:
        return any(module == target or module.endswith(f".{target}") for target in targets)

    unseen = [
        f"{name}.out_proj"
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) and is_named(f"{name}.out_proj") and not is_named(name)
    ]
    if unseen:
        raise InputError(
            f"an adapter on {join_names(unseen)} would have no effect: name the attention module itself, "
            "which adapts its output projection too"
        )
