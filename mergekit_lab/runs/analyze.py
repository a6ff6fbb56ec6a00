"""Stage analyze: analyze the run's experts, store the numbers, and draw the figure for the report.

Artifacts declared here: `analyses`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from mergekit_lab.kept_results import with_nan, without_nan
from mergekit_lab.reporting import RunFiles, write_report
from mergekit_lab.reporting.drawing import save_figure
from mergekit_lab.reporting.summary import say_count
from mergekit_lab.runs.analyses import Analysis
from mergekit_lab.runs.nodes import Node, declare
from mergekit_lab.runs.own_code import describe_code
from mergekit_lab.runs.run import Run, say_seconds
from mergekit_lab.schema.check import build
from mergekit_lab.schema.stages import list_stages
from mergekit_lab.store import Workspace

log = logging.getLogger(__name__)

DATA = "data.json"


@declare
def declare_analysis(run: Run) -> Node:
    """The numbers of the analysis that the configuration names."""
    built = build(run.cfg.analysis, Analysis)
    needs = built.list_needs(run)
    return Node(
        "analyses", f"the analysis {_name(run, built)}", "analyze", None,
        decide=lambda: built.describe_content(run) | describe_code(run.plain["analysis"]),
        make=lambda workspace: _compute(run, built, workspace),
        needs=needs,
        awaits=tuple(awaited for need in needs for awaited in need.awaits),
    )  # fmt: skip


def _name(run: Run, built: Analysis) -> str:
    return run.choices.get("analysis") or type(built).__name__


def _compute(run: Run, built: Analysis, workspace: Workspace) -> Mapping[str, Any]:
    data = built.compute(run, workspace.resume)
    (workspace.out / DATA).write_text(json.dumps(without_nan(data), allow_nan=False) + "\n")
    return {}


def stage_analyze(run: Run) -> None:
    """Run the analysis of the configuration, or find its numbers, and draw them."""
    built = build(run.cfg.analysis, Analysis)
    name = _name(run, built)
    artifact = run.obtain(declare_analysis(run))
    text = artifact.find_file(DATA).read_text()
    folder = run.folder / "analysis"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(text)
    drawing = built.draw(with_nan(json.loads(text)))
    figure = save_figure(folder / f"{name}.png", drawing.title, drawing.panels)
    run.tracker.log_figure(name, figure)
    log.info("%s: %s, %s", name, say_seconds(artifact), figure)
    _write_page(run)


def _write_page(run: Run) -> None:
    """A page of the analyses' figures, unless the run has or will have a report, in which they stand too."""
    records = run.folder / "records.jsonl"
    if "report" in list_stages(run.cfg) or (records.is_file() and records.stat().st_size):
        return
    title = f"{run.plain['suite']['name']}: analyses of {say_count(len(run.tasks), 'expert')}"
    paths = write_report(RunFiles(run.folder, [], OmegaConf.to_yaml(run.cfg)), title)
    log.info("report %s", paths.html)
