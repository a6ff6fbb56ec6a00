"""Plan runs without computing: count their distinct artifacts and those in the store, and estimate the time.

Keys follow from contents, so a plan needs no work. The exception is a merged model whose coefficient is
searched: its key is unknown until the search is done. Until then, it and its evaluations have placeholder keys.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from mergekit_lab.errors import InputError, say_duration
from mergekit_lab.reporting.summary import say_count
from mergekit_lab.runs.curvature import list_curvature_nodes, list_kinds
from mergekit_lab.runs.finetune import declare_fit, finetune_nodes
from mergekit_lab.runs.graph import list_nodes
from mergekit_lab.runs.nodes import Node, walk
from mergekit_lab.runs.run import Run
from mergekit_lab.schema.run import count_evaluations_a_step, wants_fit


@dataclass(frozen=True)
class Work:
    """A training job that several runs share.

    Attributes:
        job: the number of the run that makes it.
        only: its unit, a task or "+joint"; None: all units, because their offsets are fitted together.
    """

    job: int
    only: str | None


def describe_plan(runs: Sequence[Run]) -> str:
    """A table of what all these runs need, each artifact once: kind, number, number stored, time to make."""
    nodes: dict[str, Node] = {}
    stored: set[str] = set()
    for run in runs:
        for node in list_nodes(run):
            if nodes.setdefault(node.name, node) is node and run.find(node):
                stored.add(node.name)
    store = runs[0].store
    try:
        artifacts = list(store.list_artifacts())
    except InputError:  # stored artifacts only help to estimate times
        artifacts = []
    depths: dict[str, int] = {}
    for node in nodes.values():
        depths[node.kind] = max(depths.get(node.kind, 0), _find_depth(node))
    rows = [("", "distinct", "in the store", "to make", "about")]
    total, open_ended = 0.0, False
    for kind in sorted(depths, key=depths.__getitem__):
        names = [name for name, node in nodes.items() if node.kind == kind]
        guesses = [estimate_seconds(nodes[name], artifacts) for name in names if name not in stored]
        known = [guess for guess in guesses if guess is not None]
        open_ended = open_ended or len(known) < len(guesses)
        total += sum(known)
        about = "unknown" if guesses and not known else say_duration(sum(known))
        rows.append((kind, str(len(names)), str(len(names) - len(guesses)), str(len(guesses)), about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    end = "; what is unknown is not counted" if open_ended else ""
    summary = f"In all about {say_duration(total)} on one device, by the times of earlier runs{end}."
    if open_ended and not total:
        summary = "The time is unknown: nothing like this was made here before."
    return "\n".join([f"{say_count(len(runs), 'run')}, store {store.root}", *lines, summary])


def plan_shared_training(runs: Sequence[Run]) -> list[Work]:
    """The trainings that the store lacks, each once. Joint models come first, because they take longest.

    If several runs need an expert, the run that needs most kinds of its curvature makes it, with the curvature.
    """
    chosen: dict[str, tuple[int, Work]] = {}
    for number, run in enumerate(runs):
        missing = [node for node in walk(finetune_nodes(run)) if not run.find(node)]
        if wants_fit(run.cfg.optimizer):
            if missing:
                chosen.setdefault(declare_fit(run).key, (0, Work(number, None)))
            continue
        sides = len({kind for merger in run.mergers.values() for kind in list_kinds(merger.method)})
        for node in missing:
            if node.key not in chosen or chosen[node.key][0] < sides:
                chosen[node.key] = (sides, Work(number, node.unit))
    return sorted((work for _, work in chosen.values()), key=lambda work: work.only != "+joint")


def list_unmade(run: Run, work: Work) -> list[Node]:
    """What a training job should have made and did not, including the curvature that its run needs."""
    nodes = walk([*finetune_nodes(run), *list_curvature_nodes(run)])
    return [node for node in nodes if work.only in (None, node.unit) and not run.find(node)]


def _find_depth(node: Node) -> int:
    """The length of the longest chain of artifacts that ends with this one."""
    return 1 + max((_find_depth(each) for each in node.needs), default=0)


def estimate_seconds(node: Node, artifacts: Sequence[Any]) -> float | None:
    """The median time of similar stored artifacts; None if there are none.

    Similar are those of the same kind, origin (made or imported) and backbone; of these the ones with the same
    optimizer and method, if there are any. The time of a training is scaled by its number of gradients: its
    steps, times the gradients that its optimizer takes in a step.
    """
    like = [
        r
        for r in artifacts
        if r.kind == node.kind
        and "wall_seconds" in r.info
        and _find_source(r.content) == _find_source(node.content)
    ]
    for name in ("optimizer", "method"):
        closer = [r for r in like if r.content.get(name) == node.content.get(name)]
        like = closer or like
    if not like:
        return None
    gradients = _count_gradients(node.content)
    return statistics.median(
        r.info["wall_seconds"]
        * (gradients / before if gradients and (before := _count_gradients(r.content)) else 1)
        for r in like
    )


def _find_source(content: Mapping[str, Any]) -> tuple[bool, Any]:
    """Whether an artifact is imported, and the backbone it is of; None where only its inputs' names tell."""
    return "imported" in content, content.get("backbone") or content.get("base")


def _count_gradients(content: Mapping[str, Any]) -> float:
    """Gradients of a whole batch that a training takes; 0 if this is no training."""
    steps = float(content.get("training", {}).get("steps", 0))
    if not steps or "_target_" not in content.get("optimizer", {}):
        return steps
    node = {name: value for name, value in content["optimizer"].items() if name != "pilots"}
    return steps * _count_gradients_a_step(json.dumps(node, sort_keys=True))


@cache
def _count_gradients_a_step(optimizer: str) -> float:
    try:
        return float(count_evaluations_a_step(OmegaConf.create(json.loads(optimizer))))
    except InputError:  # the optimizer of an old artifact may not exist any more
        return 1.0
