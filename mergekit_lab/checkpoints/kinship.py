"""Whether experts descend from their base: another model has the same names and shapes.

Fine-tuning moves a matrix by a small share of its length, so that its cosine with the base's stays near 1.
Between matrices that were trained from other starts, or whose rows were sorted otherwise, it is near 0. One
layer in the middle of the model is read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn.functional import cosine_similarity

from mergekit_lab.checkpoints.checkpoint import Checkpoint
from mergekit_lab.checkpoints.layers import count_layers, split_layer
from mergekit_lab.errors import join_names

_NEAR = 0.1
"""Ours: above what chance gives, and below what long or rough training leaves."""
_FEWEST = 256
"""Entries of a matrix whose cosine says something."""
_READ = 1 << 20
"""Entries of a matrix that are compared."""


def describe_kinship(
    base: Checkpoint, experts: Mapping[str, Checkpoint], is_merged: Callable[[str], bool]
) -> list[str]:
    """Warnings of experts that are far from the base, or empty, where matrices of layers are merged."""
    cosines: dict[str, dict[str, float]] = {expert: {} for expert in experts}
    empty: dict[str, list[str]] = {expert: [] for expert in experts}
    for name in filter(is_merged, _list_middle_layer(base)):
        own = _read(base, name)
        for expert, checkpoint in experts.items():
            alike = name in checkpoint and checkpoint.specs[name].shape == base.specs[name].shape
            if alike and bool(own.any()):
                theirs = _read(checkpoint, name)
                empty[expert] += [] if bool(theirs.any()) else [name]
                cosines[expert][name] = float(cosine_similarity(own, theirs, dim=0))
    notes = [
        f"warning: {expert} has only zeros in {join_names(names, 3)}: was it saved whole?"
        for expert, names in empty.items()
        if names
    ]
    for expert, by_name in cosines.items():
        far = [name for name, cosine in by_name.items() if cosine < _NEAR and name not in empty[expert]]
        if far:
            lowest = min(by_name[name] for name in far)
            notes.append(
                f"warning: {expert} is unlike the base in {len(far)} of {len(by_name)} matrices that were "
                f"compared ({join_names(far, 3)}; cosines from {lowest:.2f}, near 1 after "
                "fine-tuning): does it come from another model, or are rows in another order?"
            )
    return notes


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    return checkpoint[name].flatten()[:_READ].float().cpu()


def _list_middle_layer(base: Checkpoint) -> list[str]:
    """Matrices of the layer in the middle of every stack."""
    middle = {stack: layers // 2 for stack, layers in count_layers(base).items()}
    matrices = [n for n, s in base.specs.items() if len(s.shape) > 1 and s.dtype.is_floating_point]
    parsed = {name: layer for name in matrices if (layer := split_layer(name)) is not None}
    inside = [name for name, layer in parsed.items() if layer.layer == middle[layer.stack]]
    return [name for name in inside if base.specs[name].numel >= _FEWEST]
