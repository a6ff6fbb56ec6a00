"""An artifact as trackers show it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mergekit_lab.reporting import Product
from mergekit_lab.runs.nodes import Node
from mergekit_lab.store import Artifact


def describe_product(
    node: Node, artifact: Artifact, inputs: tuple[str, ...], settings: Mapping[str, Any]
) -> Product:
    """Its name, a sentence, and the settings and numbers that it can be compared by.

    Args:
        inputs: references of the products that it was made of.
        settings: of the run, `optimizer` and `seed` among them.
    """
    words = [word for word in node.label.split() if word not in ("the", "of", "on", "offsets")]
    name = "-".join([*words, settings["optimizer"], f"s{settings['seed']}"])
    description = ", ".join(f"{setting} {value}" for setting, value in settings.items())
    numbers = {n: v for n, v in artifact.info.items() if isinstance(v, str | int | float | bool)}
    return Product(
        re.sub(r"[^\w.-]+", "-", name)[:120],
        artifact.key,
        artifact.kind,
        artifact.folder,
        inputs,
        f"{node.label[:1].upper()}{node.label[1:]}: {description}.",
        {**settings, "unit": node.unit, **numbers},
    )
