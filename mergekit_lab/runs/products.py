"""An artifact as trackers show it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mergekit_lab.reporting import Product
from mergekit_lab.runs.nodes import Node
from mergekit_lab.store import Artifact

if TYPE_CHECKING:
    from mergekit_lab.runs.run import Run


def describe_product(run: Run, node: Node, artifact: Artifact, inputs: tuple[str, ...]) -> Product:
    """Its name, a sentence, and the settings and numbers that it can be compared by.

    Args:
        inputs: references of the products that it was made of.
    """
    own = node.unit is not None and node.unit in run.cfg.optimizer_of
    optimizer = run.name_optimizer(node.unit) if own and node.unit else run.optimizer_name
    made_by = "imported" if run.cfg.experts else optimizer
    words = [word for word in node.label.split() if word not in ("the", "of", "on", "offsets")]
    name = re.sub(r"[^\w.-]+", "-", "-".join([*words, made_by, f"s{run.seed}"]))[:120]
    axes = {
        "backbone": run.choices.get("backbone"), "suite": run.plain["suite"]["name"],
        "finetuning": run.choices.get("finetuning"), "optimizer": made_by, "seed": run.seed,
    }  # fmt: skip
    numbers = {n: v for n, v in artifact.info.items() if isinstance(v, str | int | float | bool)}
    settings = ", ".join(f"{axis} {value}" for axis, value in axes.items())
    return Product(
        name, artifact.key, artifact.kind, artifact.folder, inputs,
        f"{node.label[:1].upper()}{node.label[1:]}: {settings}.", {**axes, "unit": node.unit, **numbers},
    )  # fmt: skip
