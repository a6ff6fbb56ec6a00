"""Stage report: collect the run's records from the store, and write its table, figures and page."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from omegaconf import OmegaConf

from mergekit_lab.errors import InputError, join_names
from mergekit_lab.reporting import Record, RunFiles, print_table, write_report
from mergekit_lab.reporting.summary import say_cache, say_count
from mergekit_lab.runs.compare import draw_cross_table
from mergekit_lab.runs.evaluate import list_models
from mergekit_lab.runs.finetune import declare_expert, declare_joint
from mergekit_lab.runs.learn import reads_test_inputs
from mergekit_lab.runs.mergers import say_fields
from mergekit_lab.runs.models import Model, declare_evaluation, read_metric, read_samples
from mergekit_lab.runs.origin import describe_origin
from mergekit_lab.runs.published import set_published_beside
from mergekit_lab.runs.run import MODEL, Run
from mergekit_lab.runs.search import declare_search, list_curve, read_coefficient, read_fields
from mergekit_lab.runs.train import CURVE
from mergekit_lab.store import Artifact

log = logging.getLogger(__name__)
_Evaluation: TypeAlias = tuple[Model, str, Artifact]
"""A model, a task, and the evaluation of the one on the other."""


def stage_report(run: Run) -> None:
    """Collect the run's records and write table, figures and page into its folder."""
    evaluations = read_evaluations(run)
    records = collect(run, evaluations)
    curves = {task: _read_curve(run.need(declare_expert(run, task))) for task in run.experts}
    if run.cfg.joint and (artifact := run.find(declare_joint(run))):
        curves["+joint"] = _read_curve(artifact)
    if run.backbone.note:
        log.info("%s", run.backbone.note)
    files = RunFiles(
        run.folder,
        records,
        OmegaConf.to_yaml(run.cfg),
        curves=curves,
        searches=_read_searches(run),
        timings=run.timings,
        samples=_read_samples(run, evaluations),
        published=set_published_beside(run, records),
        origin=describe_origin(run.arguments, run.devices),
    )
    paths = write_report(files, _make_title(run))
    run.tracker.log_summary(paths.table)
    run.tracker.log_records(records)
    for figure in paths.figures:
        run.tracker.log_figure(figure.stem, figure)
    print_table(paths.table)
    try:
        draw_cross_table(run.cfg, run.folder, records)
    except InputError as error:  # a job of a sweep may lack what is fixed for the comparison
        log.warning("table.md is left out: %s", error)
    log.info("%s The store is %s", say_cache(records), run.store.root)
    log.info("table %s\nreport %s", paths.summary, paths.html)


def _make_title(run: Run) -> str:
    """The page's title: what is compared, with what a reader must know to judge it."""
    title = f"{run.plain['suite']['name']}: "
    if run.models:
        title += f"{say_count(len(run.models), 'checkpoint')} on {say_count(len(run.tasks), 'task')}"
    else:
        title += f"{say_count(len(run.mergers), 'way')} to merge {say_count(len(run.experts), 'expert')}"
    readers = [label for label in run.mergers if reads_test_inputs(run.mergers[label])]
    if readers:
        title += f"; {join_names(readers)} read test inputs, without their labels"
    if not run.cfg.joint and not run.cfg.experts and not run.models:
        title += "; joint=true adds a model trained on all tasks at once"
    return title + (f" ({run.backbone.note})" if run.backbone.note else "")


def _read_curve(expert: Artifact) -> Any:
    return json.loads(expert.find_file(CURVE).read_text())


def collect(run: Run, evaluations: Sequence[_Evaluation]) -> list[Record]:
    """One record per model and task, read from the store."""
    best: dict[str, float] = {}
    for model, task, artifact in evaluations:
        if model.kind in ("expert", "checkpoint"):
            best[task] = max(best.get(task, -math.inf), read_metric(run, task, artifact)[1])
    base = {task: read_metric(run, task, a)[1] for model, task, a in evaluations if model.kind == "zero_shot"}
    return [_record(run, model, task, a, best[task], base.get(task)) for model, task, a in evaluations]


def read_evaluations(run: Run) -> list[_Evaluation]:
    """All evaluations that the run's tables show.

    Raises:
        InputError: an evaluation is missing.
    """
    evaluations: list[_Evaluation] = []
    for model in list_models(run):
        if model.node:
            run.need(model.node)
        for task in model.tasks:
            artifact = run.find(declare_evaluation(run, model, task, "test"))
            if artifact is None:
                raise InputError(f"{model.label} is not evaluated on {task}: run stage=evaluate first")
            evaluations.append((model, task, artifact))
    return evaluations


def _record(
    run: Run, model: Model, task: str, artifact: Artifact, expert_value: float, zero_shot_value: float | None
) -> Record:
    metric, value = read_metric(run, task, artifact)
    return Record(
        backbone=run.choices["backbone"],
        suite=run.plain["suite"]["name"],
        finetuning=run.choices["finetuning"],
        optimizer=run.name_optimizer(),
        kind=model.kind,
        merger=model.merger.label if model.merger else None,
        model=model.name,
        coefficient=read_coefficient(run, model.merger) if model.merger else None,
        task=task,
        part="test",
        metric=metric,
        value=value,
        expert_value=expert_value,
        zero_shot_value=zero_shot_value,
        seed=run.seed,
        wall_seconds=artifact.info["wall_seconds"],
        peak_memory_bytes=artifact.info["peak_memory_bytes"],
        model_key=model.find_key(run),
        evaluation_key=artifact.key,
        reused=artifact.key not in run.new_keys,
        reads_test_inputs=reads_test_inputs(model.merger) if model.merger else None,
        chosen=say_fields(model.merger.content, read_fields(run, model.merger)) if model.merger else None,
        **_read_cost(run, model),
    )


def _read_cost(run: Run, model: Model) -> dict[str, Any]:
    """What making the model took, including side inputs and searches but not experts, from the manifests."""
    if model.node is None:
        return {}
    parts = [model.node]
    if model.merger:
        parts += [node for node in model.node.needs if node.kind != "experts"]
    artifact = run.need(model.node)
    return {
        "model_seconds": sum(run.need(node).info["wall_seconds"] for node in parts),
        "model_peak_memory_bytes": artifact.info.get("peak_memory_bytes"),
        "weights": artifact.files.get(MODEL),
    }


def _read_samples(run: Run, evaluations: Sequence[_Evaluation]) -> dict[str, Any]:
    """Each test sample's contribution, by evaluation key, for metrics that are means over samples."""
    by_key = {artifact.key: read_samples(run, task, artifact) for _, task, artifact in evaluations}
    return {key: samples for key, samples in by_key.items() if samples is not None}


def _read_searches(run: Run) -> dict[str, list[dict[str, Any]]]:
    """For every merger the validation curve of its coefficient, at the chosen values of searched fields."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for label, merger in run.mergers.items():
        if not merger.searched or run.search.method == "cma_es":  # which searches many weights
            continue
        if search := run.find(declare_search(run, label)):
            chosen = search.info
            curves[label] = [
                {name: point[name] for name in ("coefficient", "normalized")}
                | {"chosen": point["coefficient"] == chosen["coefficient"]}
                for point in list_curve(search)
                if point.get("fields", {}) == chosen.get("fields", {})
            ]
    return curves
