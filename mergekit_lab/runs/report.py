"""Stage report: the records of the run, from the store, and every view of them."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property, partial
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, ListConfig, OmegaConf

from mergekit_lab.backbones import OpenClip
from mergekit_lab.errors import InputError
from mergekit_lab.reporting import (
    Beside,
    Record,
    compare,
    print_table,
    read_records,
    set_beside,
    write_cross_table,
    write_report,
)
from mergekit_lab.reporting.html import say_cache
from mergekit_lab.reporting.summary import say_count
from mergekit_lab.runs.adaptive import learning_content, learns
from mergekit_lab.runs.analyses import TaskVectors
from mergekit_lab.runs.analyze import DATA
from mergekit_lab.runs.context import Context
from mergekit_lab.runs.evaluate import SAMPLES, Subject, evaluation_content, subjects
from mergekit_lab.runs.finetune import CURVE
from mergekit_lab.runs.merge import chosen_coefficient, merged_content
from mergekit_lab.schema.check import build
from mergekit_lab.store import Artifact

log = logging.getLogger(__name__)


def stage_report(run: Context) -> None:
    """Collect the run's records and write table, figures and page into its folder."""
    records = collect(run)
    curves = {task: json.loads(run.expert(task).file(CURVE).read_text()) for task in run.tasks}
    if run.cfg.joint and (joint := run.store.find("joint", run.joint_content())):
        curves["+joint"] = json.loads(joint.file(CURVE).read_text())
    title = f"{run.plain['suite']['name']}: {say_count(len(run.mergers), 'way')} to merge "
    title += say_count(len(run.tasks), "expert")
    if run.backbone.note:
        title += f" ({run.backbone.note})"
        log.info("%s", run.backbone.note)
    paths = write_report(
        run.folder,
        records,
        curves=curves,
        searches=_searches(run),
        config_yaml=OmegaConf.to_yaml(run.cfg),
        timings=run.timings,
        samples=_samples(run),
        published=_published(run, records),
        title=title,
    )
    run.tracker.log_summary(paths.table)
    for figure in paths.figures:
        run.tracker.log_figure(figure.stem, figure)
    print_table(paths.table)
    try:
        _slice(run.cfg, run.folder, records)
    except InputError as error:  # a job of a sweep may lack what is fixed for the comparison
        log.warning("table.md is left out: %s", error)
    log.info("%s The store is %s", say_cache(records), run.store.root)
    log.info("table %s\nreport %s", paths.summary, paths.html)


def _slice(cfg: DictConfig, folder: Path, records: list[Record]) -> None:
    if cfg.table:
        print_table(write_cross_table(folder, records, cfg.table, cfg.metric))


def collect(run: Context) -> list[Record]:
    """One record a (model, task), all from artifacts.

    Raises:
        InputError: an evaluation is missing.
    """
    cells = _evaluations(run)
    expert = {task: a.info["value"] for s, task, a in cells if s.kind == "expert"}
    zero_shot = {task: a.info["value"] for s, task, a in cells if s.kind == "zero_shot"}
    return [_record(run, s, task, a, expert[task], zero_shot[task]) for s, task, a in cells]


def _evaluations(run: Context) -> list[tuple[Subject, str, Artifact]]:
    cells: list[tuple[Subject, str, Artifact]] = []
    for subject in subjects(run):
        for task in subject.tasks:
            content = evaluation_content(run, subject, task, "test")
            found = run.store.find("evaluations", content)
            if found is None:
                raise InputError(f"{subject.kind} is not evaluated on {task}: run stage=evaluate first")
            cells.append((subject, task, found))
    return cells


def _record(
    run: Context, subject: Subject, task: str, found: Artifact, expert_value: float, zero_shot_value: float
) -> Record:
    return Record(
        backbone=run.choices["backbone"],
        suite=run.plain["suite"]["name"],
        finetuning=run.choices["finetuning"],
        optimizer=run.optimizer_name,
        kind=subject.kind,
        merger=subject.merger.label if subject.merger else None,
        coefficient=chosen_coefficient(run, subject.merger) if subject.merger else None,
        task=task,
        part="test",
        metric=run.tasks[task].metric,
        value=found.info["value"],
        expert_value=expert_value,
        zero_shot_value=zero_shot_value,
        seed=run.seed,
        wall_seconds=found.info["wall_seconds"],
        peak_memory_bytes=found.info["peak_memory_bytes"],
        model_key=subject.key,
        evaluation_key=found.key,
        reused=found.key not in run.made,
        **_cost(run, subject),
    )


def _cost(run: Context, subject: Subject) -> dict[str, Any]:
    """What making the model took, from the manifests of what it is made of."""
    if subject.made is None:
        return {}
    parts = [subject.made]
    if subject.merger:
        merger = subject.merger
        parts += [run.side(kind, task) for kind in merger.method.side_inputs for task in run.tasks]
        if merger.searched and (found := run.store.find("searches", run.search_content(merger))):
            parts.append(found)
        if learns(merger) and (found := run.store.find("coefficients", learning_content(run, merger))):
            parts.append(found)
    return {
        "model_seconds": sum(part.info["wall_seconds"] for part in parts),
        "model_peak_memory_bytes": subject.made.info.get("peak_memory_bytes"),
        "weights": next((h for name, h in subject.made.files.items() if name.endswith(".safetensors")), None),
    }


def _samples(run: Context) -> dict[str, Any]:
    """What every test sample contributed, by evaluation key; metrics that are no means have none."""
    files = {found.key: found.file(SAMPLES) for _, _, found in _evaluations(run)}
    return {key: np.load(file, allow_pickle=False) for key, file in files.items() if file.is_file()}


def _searches(run: Context) -> dict[str, list[dict[str, Any]]]:
    result = {}
    for label, merger in run.mergers.items():
        found = run.store.find("searches", run.search_content(merger)) if merger.searched else None
        if found:
            chosen = found.info["coefficient"]
            result[label] = [
                {
                    "coefficient": p["coefficient"],
                    "normalized": p["normalized"],
                    "chosen": p["coefficient"] == chosen,
                }
                for p in found.info["curve"]
                if p.get("share", 1.0) == 1
                and not p.get("pruned")
                and p.get("fields", {}) == found.info.get("fields", {})
            ]
    return result


def _published(run: Context, records: list[Record]) -> list[Beside]:
    """The tables of papers that the run names, with what it measured."""
    axes = {axis: run.choices[axis] for axis in ("backbone", "finetuning", "optimizer")}
    measured = _Measured(run, records)
    holds = partial(_holds, run)
    return [
        row for name in run.plain["published"] for row in set_beside(name, measured, axes, holds, run.tasks)
    ]


def _holds(run: Context, when: str) -> bool:
    """Whether `key=value …` are the run's settings; `key?=value` is asked only where the run has the key."""
    for pair in when.split():
        key, _, value = pair.partition("=")
        found = _setting(run, key.removesuffix("?"))
        if not (_same(found, value) or (key.endswith("?") and found is None)):
            return False
    return True


def _setting(run: Context, key: str) -> Any:
    """A value of the configuration, as the run uses it: `merger=NAME` takes the place of its `mergers`."""
    if key == "backbone.weights" and isinstance(run.backbone, OpenClip) and run.backbone.source:
        return run.backbone.source.published_as()
    group, _, rest = key.partition(".")
    if group == "mergers":
        label, _, name = rest.partition(".")
        content = run.mergers[label].content if label in run.mergers else {}
        return OmegaConf.select(OmegaConf.create(dict(content)), name)
    return OmegaConf.select(run.cfg, key)


def _same(value: Any, text: str) -> bool:
    if isinstance(value, ListConfig):
        texts = text.strip("[]").split(",")
        return len(texts) == len(value) and all(map(_same, value, texts))
    if isinstance(value, bool):
        return str(value).lower() == text
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return str(value) == text


class _Measured:
    """Ours of a published table: by row and column, in the column's unit.

    Columns: `average` and `normalized` are percent over tasks; `steps_per_second` and `gigabytes` are of
    training an expert, means over tasks; `merge_seconds` is what making a merged model took. Rows:
    `training_seconds` is what experts took; `ks_distance` (in percent) and `mean_log_likelihood` are of a
    Laplace distribution fitted to task vectors, if the analysis task_vectors has been made.
    """

    def __init__(self, run: Context, records: list[Record]) -> None:
        self.run = run
        self.rows: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            name = {"expert": "experts"}.get(record.kind, record.kind)
            self.rows[record.merger or name].append(record)

    def __call__(self, row: str, column: str) -> float | None:
        if row in ("training_seconds", "ks_distance", "mean_log_likelihood"):
            tasks = [task for task in self.run.tasks if column in ("average", task)]
            told = [value for task in tasks if (value := self._of_expert(task, row)) is not None]
            return sum(told) / len(told) if told else None
        if column in ("steps_per_second", "gigabytes"):
            costs = [cost for task in self.run.tasks if (cost := self._cost(task, column)) is not None]
            return sum(costs) / len(costs) if costs and row == "experts" else None
        if column == "merge_seconds":
            merger = self.run.mergers.get(row)
            found = self.run.store.find("merged", merged_content(self.run, merger)) if merger else None
            return float(found.info["wall_seconds"]) if found else None
        members = self.rows.get(row, [])
        values = [value for record in members if (value := self._value(record, column)) is not None]
        return 100 * sum(values) / len(values) if values else None

    def _of_expert(self, task: str, what: str) -> float | None:
        if what == "training_seconds":
            return float(self.run.expert(task).info["wall_seconds"])
        fit = self._fits.get(task)
        return None if fit is None else float(fit[what]) * (100 if what == "ks_distance" else 1)

    @cached_property
    def _fits(self) -> dict[str, Any]:
        """Of a Laplace distribution to every expert's task vector, by task."""
        analysis = build(self.run.cfg.analysis)
        content = analysis.content(self.run) if isinstance(analysis, TaskVectors) else None
        made = self.run.store.find("analyses", content) if content else None
        fits = json.loads(made.file(DATA).read_text())["fits"] if made else {}
        return {task: fit["laplace"] for task, fit in fits.items()}

    def _cost(self, task: str, column: str) -> float | None:
        cost = self.run.expert(task).info.get(column)
        return None if cost is None else float(cost)

    def _value(self, record: Record, column: str) -> float | None:
        if column == "normalized":
            return record.normalized
        return record.value if column in ("average", record.task) else None


def report_runs(cfg: DictConfig, folder: Path) -> None:
    """`stage=report runs=…`: one comparison over runs that are there, from their folders alone.

    Raises:
        InputError: a folder that is not there, none that holds a run, or none whose run has a result.
    """
    given = [cfg.runs] if isinstance(cfg.runs, str | int) else list(cfg.runs)
    folders = [place for pattern in given for place in _run_folders(str(pattern))]
    paths = compare(folders, folder, title=f"Comparison of {say_count(len(folders), 'run')}")
    for failure in paths.failures:
        log.warning("left out: %s: %s", failure.run, failure.error)
    if not paths.table.rows:
        raise InputError(f"no run of runs={cfg.runs} has a result; {paths.summary} lists what each lacks")
    print_table(paths.table)
    _slice(cfg, folder, read_records(paths.records))
    log.info("comparison %s\nreport %s", paths.summary, paths.html)


def _run_folders(pattern: str) -> list[Path]:
    """The folders of runs that a path or a glob names; of a sweep, its jobs."""
    path = Path(pattern).expanduser()
    found = [path] if path.is_dir() else sorted(map(Path, glob(str(path))))
    folders = [place for place in found if place.is_dir()]
    if not folders:
        raise InputError(f"runs={pattern}: there is no such folder")
    held = [job for place in folders for job in (_jobs_of(place) or [place] * _is_run(place))]
    if not held:
        raise InputError(f"runs={pattern}: {folders[0]} holds no run (no records.jsonl, no failure.json)")
    return held


def _jobs_of(folder: Path) -> list[Path]:
    """A sweep's jobs are numbered; those too that died before they could leave word."""
    found = [place for place in folder.iterdir() if place.name.isdigit()]
    jobs = [place for place in found if _is_run(place) or (place / ".hydra").is_dir()]
    return sorted(jobs, key=lambda place: int(place.name))


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("records.jsonl", "failure.json"))


def report_sweep(folders: Iterable[Path], out: Path, cfg: DictConfig) -> None:
    """One comparison over the jobs of a sweep, and the `table` asked for; jobs that failed are listed."""
    paths = compare(folders, out, title="Comparison of a sweep")
    print_table(paths.table)
    _slice(cfg, out, read_records(paths.records))
    log.info("comparison %s\nreport %s", paths.summary, paths.html)
