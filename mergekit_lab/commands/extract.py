"""A LoRA adapter of what fine-tuning changed in a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mergekit_lab.commands.merge_checkpoints import merge
from mergekit_lab.merging import TaskArithmetic
from mergekit_lab.merging.devices import Devices
from mergekit_lab.merging.inputs import Source
from mergekit_lab.ranges import Count, Share


def extract(
    base: Source,
    expert: Source,
    out: str | Path,
    *,
    rank: Count | None = None,
    energy: Share | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    dtype: str | None = None,
    device: Devices = "auto",
    overwrite: bool = False,
    push_to: str | None = None,
    push_private: bool = True,
    progress: bool = False,
) -> Path:
    """Make a LoRA adapter of a task vector, a folder that peft loads on the base.

    Every changed weight of a linear layer is cut to its largest singular directions. Other changes (embeddings,
    norms, biases) are left out; the card names them, and says how much is lost.

    Args:
        base: what the expert was fine-tuned from.
        expert: the fine-tuned model.
        out: the folder to make; it appears whole or not at all.
        rank: at most so many directions per weight, at least 1.
        energy: keep at least this share of each weight's squared change, in (0, 1].
        dtype: the factors' dtype; float32 by default.
        include, exclude, device, overwrite, push_to, push_private, progress: as `merge` takes them.

    Returns:
        `out`.

    Raises:
        InputError: neither `rank` nor `energy`, inputs that do not fit each other, or an `out` that cannot be
            written.
    """
    return merge(
        base, {"expert": expert}, out, TaskArithmetic(coefficient=1.0), format="adapter", rank=rank,
        energy=energy, include=include, exclude=exclude, dtype=dtype, device=device, overwrite=overwrite,
        push_to=push_to, push_private=push_private, progress=progress,
    )  # fmt: skip
