"""The graph of a run: every artifact that its configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator

from mergekit_lab.runs.analyze import declare_analysis
from mergekit_lab.runs.curvature import list_curvature_nodes
from mergekit_lab.runs.evaluate import list_evaluation_nodes
from mergekit_lab.runs.finetune import finetune_nodes
from mergekit_lab.runs.merge import merge_nodes
from mergekit_lab.runs.nodes import Node, walk
from mergekit_lab.runs.run import Run
from mergekit_lab.schema.stages import list_stages


def list_nodes(run: Run) -> Iterator[Node]:
    """Every artifact, in the order in which they are made."""
    analyses = [declare_analysis(run)] if "analyze" in list_stages(run.cfg) else []
    return walk(
        [
            *finetune_nodes(run),
            *list_curvature_nodes(run),
            *merge_nodes(run),
            *list_evaluation_nodes(run),
            *analyses,
        ]
    )
