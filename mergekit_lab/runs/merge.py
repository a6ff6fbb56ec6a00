"""Stage merge: choose each merger's coefficient on validation, and write its merged model.

Artifacts declared here: `merged`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.checkpoints import (
    LowRankRecord,
    ShardedWriter,
    fingerprint,
    open_checkpoint,
    write_files,
    write_tensors,
)
from mergekit_lab.memory import read_peak_memory, reset_peak_memory
from mergekit_lab.merging import AdaMerging, Method, merge_factors
from mergekit_lab.runs.combine import describe_merge, list_merge_inputs, merge_experts
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.learn import COEFFICIENTS, declare_coefficients, is_learned
from mergekit_lab.runs.mergers import Merger
from mergekit_lab.runs.models import TASK_FACTORS, Model
from mergekit_lab.runs.nodes import Node, declare, walk
from mergekit_lab.runs.run import MODEL, Run, say_seconds
from mergekit_lab.runs.search import declare_search, read_coefficient, read_fields
from mergekit_lab.store import Artifact, Workspace

log = logging.getLogger(__name__)


@declare
def declare_merged(run: Run, label: str) -> Node:
    """A merger's model. Its key is known when its coefficient is chosen."""
    merger = run.mergers[label]
    searches = (declare_search(run, label),) if merger.searched else ()
    learned = (declare_coefficients(run, label),) if is_learned(merger) else ()
    return Node(
        "merged", f"the model of {label}", "merge", label,
        decide=lambda: _describe_merged(run, merger),
        make=lambda workspace: _merge(run, merger, workspace),
        needs=(*list_merge_inputs(run, merger), *searches, *learned),
        awaits=searches,
        say=lambda merged: _say(merger, merged),
        list_points=lambda merged: [{"merge_seconds": merged.info["wall_seconds"]}],
    )  # fmt: skip


def _describe_merged(run: Run, merger: Merger) -> dict[str, Any]:
    """Everything that decides the model, including what is searched or learned."""
    if merger.searched and not run.find(declare_search(run, merger.label)):
        return {"search": declare_search(run, merger.label).key}
    content = describe_merge(run, merger, {**merger.content, **read_fields(run, merger)})
    if merger.searched:
        content["coefficient"] = read_coefficient(run, merger)
    if is_learned(merger):
        content["coefficients"] = declare_coefficients(run, merger.label).key
    return content


def make_merged_model(run: Run, label: str) -> Model:
    """A merger's model, which is evaluated on all tasks."""
    return Model("merged", tuple(run.tasks), declare_merged(run, label), run.mergers[label])


def merge_nodes(run: Run) -> list[Node]:
    """What the stage makes, in order."""
    return [node for node in walk(declare_merged(run, label) for label in run.mergers) if node.stage == "merge"]


def stage_merge(run: Run) -> None:
    """Choose each coefficient and write each merged model, on the run's devices."""
    if not run.mergers:
        log.info("merge: this run names no merger; set merger=NAME")
    try:
        run.make(stage_merge, merge_nodes(run))
    finally:
        run.moved.clear()


def _say(merger: Merger, merged: Artifact) -> str:
    alpha = merged.info["coefficient"]
    return f"{merger.label}: {say_seconds(merged)}" + ("" if alpha is None else f", coefficient {alpha:g}")


def _write_task_factors(run: Run, method: Method, folder: Path) -> None:
    """Write the factors from which each task's own model is made."""
    folder.mkdir()
    base = open_checkpoint(run.base_state, "the base")
    experts = {task: run.need(declare_expert(run, task)).find_file(MODEL) for task in run.experts}
    specs, tensors = merge_factors(base, experts, method, device=run.devices)
    with ShardedWriter(folder, specs, stem=LowRankRecord.stem) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)
    ties = base.find_ties()
    record = LowRankRecord(list(experts), method.scale, None, ties, fingerprint(base, "the base"))
    write_files(record.make_files(), folder)


def _merge(run: Run, merger: Merger, workspace: Workspace) -> Mapping[str, Any]:
    alpha = read_coefficient(run, merger)
    method = merger.with_fields(read_fields(run, merger))
    if merger.searched and alpha is not None:
        method = method.with_coefficient(alpha)
    if is_learned(merger):
        learned = run.need(declare_coefficients(run, merger.label)).find_file(COEFFICIENTS)
        method = AdaMerging(weights=json.loads(learned.read_text()))
    notes: dict[str, dict[str, object]] = {}
    reset_peak_memory(run.device)
    write_tensors(workspace.out / MODEL, merge_experts(run, method, notes=notes, stays=True), sync=False)
    if method.by_task:
        _write_task_factors(run, method, workspace.out / TASK_FACTORS)
    (workspace.out / "notes.json").write_text(json.dumps(notes, indent=1))
    return {"method": repr(method), "coefficient": alpha, "peak_memory_bytes": read_peak_memory(run.device)}
