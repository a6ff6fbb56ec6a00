"""All artifacts that a run wants."""

from __future__ import annotations

from collections.abc import Iterator

from mergekit_lab.runs.analyze import analysis_node
from mergekit_lab.runs.curvature import curvature_nodes
from mergekit_lab.runs.evaluate import evaluation_nodes
from mergekit_lab.runs.finetune import finetune_nodes
from mergekit_lab.runs.merge import merge_nodes
from mergekit_lab.runs.models import evaluation_node, expert_model
from mergekit_lab.runs.nodes import Node
from mergekit_lab.runs.run import Run
from mergekit_lab.schema.check import list_stages


def list_nodes(run: Run) -> Iterator[Node]:
    """Every artifact, in the order in which they are made."""
    yield from finetune_nodes(run)
    yield from curvature_nodes(run)
    if any(merger.searched for merger in run.mergers.values()):
        yield from (evaluation_node(run, expert_model(run, task), task, "validation") for task in run.experts)
    yield from merge_nodes(run)
    yield from evaluation_nodes(run)
    if "analyze" in list_stages(run.cfg):
        yield analysis_node(run)
