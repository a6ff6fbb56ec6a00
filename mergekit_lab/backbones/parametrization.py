"""Which weights of a pretrained model train, and how they become a checkpoint with the model's names.

A parametrization is a frozen dataclass whose fields are its hyper-parameters. It works on any `nn.Module`:
`make_trainable` comes before training, `fold` after it, and `make_evaluable` before any checkpoint, also a
merged one, is evaluated. `linearized.py` and `lora.py` have more of them.

Jin, Hou, Xiao, Su, Shen: Fine-tuning attention modules only: Enhancing weight disentanglement in task
arithmetic (ICLR 2025); FTLO in the SAFT paper (Lee et al., ICLR 2025), appendix A.1.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from mergekit_lab.backbones.attention import list_attention_weights
from mergekit_lab.errors import InputError


class Parametrization:
    """How a model is fine-tuned. An expert is always a checkpoint with the base's names.

    Attributes:
        takes_sharded: whether weights may be sharded over processes. The model's own modules must then hold and
            use them.
    """

    takes_sharded: ClassVar[bool] = True

    def make_trainable(self, model: nn.Module, seed: int = 0) -> nn.Module:
        """The model to train. Parameters that require a gradient train.

        Args:
            model: the pretrained model. It is changed, and may become part of the result.
            seed: draws initial values, such as LoRA's.

        Raises:
            InputError: the parametrization does not apply to this model.
        """
        return model

    def fold(self, model: nn.Module) -> dict[str, Tensor]:
        """The state dict of `make_trainable`'s result, with the base's names and shapes."""
        return dict(model.state_dict())

    def make_evaluable(self, model: nn.Module) -> nn.Module:
        """A model that computes what experts compute, after loading a `fold` or a merged state dict.

        Args:
            model: the pretrained model. It is changed, and may become part of the result.
        """
        return model


@dataclass(frozen=True)
class Full(Parametrization):
    """Every parameter trains."""


@dataclass(frozen=True)
class AttentionLinear(Parametrization):
    """Only attention's query, key, value and output weights train, without biases.

    All other tensors of an expert are the base's, bit for bit.
    """

    def make_trainable(self, model: nn.Module, seed: int = 0) -> nn.Module:
        chosen = set(list_attention_weights(model))
        if not chosen:
            raise InputError(
                f"finetuning=attention_linear trains the projections of attention, and {type(model).__name__} "
                "has none with a known name (such as attn.in_proj_weight or self_attn.q_proj.weight): "
                "take finetuning=full"
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
        return model
