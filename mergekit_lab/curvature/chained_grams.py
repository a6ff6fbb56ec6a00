"""Grams for RegMean++: of every layer on what the merged layers before it put out.

Nguyen et al. 2025, "RegMean++: enhancing effectiveness and generalization of regression mean for model
merging", section 3. RegMean weighs an expert's layer by the inputs that the expert's own layers below give it;
in the merged model, merged layers give others. So layers are merged one after another: what is before them by
the mean, then with each task's samples the first layer's Grams, in each expert, on those inputs; its merge; its
outputs; and on.

Reference: nthehai01/RegMean-plusplus (`RegMeanAlgorithmPlusPlus`), which leaves at the base what stands after
the layers. Here that is the mean, as in RegMean.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mergekit_lab.batches import Batch
from mergekit_lab.checkpoints import split_layer
from mergekit_lab.curvature.fisher import switch_to_evaluation
from mergekit_lab.curvature.gram import InputSums, list_keys
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.merging import RegMeanPlusPlus, merge_state_dicts

_Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""How a layer was called with one batch, but for its first argument."""


@torch.no_grad()
def chained_grams(
    model: nn.Module,
    experts: Mapping[str, Mapping[str, Tensor]],
    batches: Callable[[str], Iterable[Batch]],
    method: RegMeanPlusPlus,
    wholes: Mapping[str, nn.Module] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """The Grams with which `method` merges these experts as RegMean++ does.

    Args:
        model: the base; it has one stack of layers, each of which takes hidden states as its first argument
            and returns them, alone or first of a tuple. Its weights change; it is left with those of the merge,
            and in evaluation mode for the duration.
        experts: state dicts or open checkpoints by name, with the model's names.
        batches: of an expert's task, as `input_grams` takes them; called once for each expert.
        method: its fields decide the merged layers.
        wholes: by expert what is called with its batches and holds `model`; the model itself by default.

    Returns:
        By expert, for `statistics={"chained_gram": …}`; see `input_grams`.

    Raises:
        InputError: a model without one stack of layers, or layers that are called otherwise.
    """
    stack, layers = _find_layers(model)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    grams: dict[str, dict[str, Tensor]] = {name: {} for name in experts}

    def merge(names: list[str]) -> None:
        """Put the merge of these tensors into the model."""
        inside = {split.stack for name in names if (split := split_layer(name))}
        statistics = {"chained_gram": grams if inside else {name: {} for name in experts}}
        origin, *own = ({n: state[n] for n in names} for state in (base, *experts.values()))
        named = dict(zip(experts, own, strict=True))
        merged = merge_state_dicts(origin, named, method, statistics=statistics)
        model.load_state_dict(merged, strict=False)

    def run_layer(number: int, expert: str) -> Iterator[Tensor]:
        for x, batch in zip(hidden[expert], calls[expert], strict=True):
            others, named = batch[number]
            output = layers[number](x, *others, **named)
            yield output[0] if isinstance(output, tuple) else output

    with switch_to_evaluation(model):
        merge([name for name in base if not split_layer(name)])
        hidden: dict[str, list[Tensor]] = {}
        calls: dict[str, list[list[_Call]]] = {}
        for expert in experts:
            whole = model if wholes is None else wholes[expert]
            hidden[expert], calls[expert] = _record_calls(whole, layers, batches(expert))
        for number, layer in enumerate(layers):
            prefix = f"{stack}.{number}."
            names = [name for name in base if name.startswith(prefix)]
            keys = {k: prefix + key for k, key in list_keys(layer).items()}
            for expert, state in experts.items():
                layer.load_state_dict({n.removeprefix(prefix): state[n] for n in names})
                inside = InputSums(keys)
                with inside:
                    deque(run_layer(number, expert), maxlen=0)
                grams[expert] |= inside.compute_means()
            merge(names)
            for expert in experts:
                hidden[expert] = list(run_layer(number, expert))
    return grams


def _find_layers(model: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential]:
    stacks = {split.stack for name in model.state_dict() if (split := split_layer(name))}
    if len(stacks) != 1:
        what = f"several ({join_names(stacks)})" if stacks else "none"
        raise InputError(f"RegMean++ merges one stack of layers in their order, and this model has {what}")
    stack = stacks.pop()
    layers = model.get_submodule(stack)
    assert isinstance(layers, nn.ModuleList | nn.Sequential)
    return stack, layers


def _record_calls(
    whole: nn.Module, layers: Iterable[nn.Module], batches: Iterable[Batch]
) -> tuple[list[Tensor], list[list[_Call]]]:
    """What enters the first layer with each batch, and how every layer is called with it."""
    entered: list[Tensor] = []
    calls: list[list[_Call]] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise InputError(
                f"RegMean++ calls layers one by one, and {type(layer).__name__} takes no hidden states first"
            )
        if not calls[-1]:
            entered.append(args[0])
        calls[-1].append((args[1:], kwargs))

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        for batch in batches:
            calls.append([])
            _ = whole(**batch) if isinstance(batch, Mapping) else whole(batch[0])
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        raise InputError("there is nothing to compute Grams from: no batch was given")
    return entered, calls
