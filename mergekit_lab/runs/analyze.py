"""Stage analyze: an analysis of the run's experts, its numbers into the store, its figure beside the report."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.reporting.figures import draw_analysis
from mergekit_lab.runs.analyses import Analysis
from mergekit_lab.runs.analyses.contract import with_nan, without_nan
from mergekit_lab.runs.context import Context
from mergekit_lab.schema.check import build
from mergekit_lab.store.store import Workplace

log = logging.getLogger(__name__)

DATA = "data.json"


def stage_analyze(run: Context) -> None:
    """Run the analysis of the configuration, or find its numbers, and draw them."""
    analysis = build(run.cfg.analysis)
    if not isinstance(analysis, Analysis):
        raise InputError(f"analysis is a {type(analysis).__name__}, not an analysis")
    name = run.choices.get("analysis") or type(analysis).__name__

    def make(place: Workplace) -> Mapping[str, Any]:
        data = analysis.compute(run, place.resume)
        (place.out / DATA).write_text(json.dumps(without_nan(data), allow_nan=False) + "\n")
        return {}

    found = run.obtain("analyses", analysis.content(run), make)
    text = found.file(DATA).read_text()
    folder = run.folder / "analysis"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(text)
    drawing = analysis.draw(with_nan(json.loads(text)))
    paths = draw_analysis(drawing.title, drawing.panels, folder / name, **drawing.options)
    run.tracker.log_figure(name, paths[0])
    how = "found in the store" if found.reused else f"{found.info['wall_seconds']:.1f} s"
    log.info("%s: %s, %s", name, how, paths[0])
