"""Set tables of papers beside a run's results."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache, cached_property, partial
from typing import Any

from omegaconf import ListConfig, OmegaConf

from mergekit_lab.backbones import OpenClip
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.reporting import Beside, Record, set_beside
from mergekit_lab.reporting.paper_tables import read_protocols
from mergekit_lab.reporting.published import Protocol
from mergekit_lab.runs.analyses import Analysis, TaskVectors
from mergekit_lab.runs.analyze import DATA, declare_analysis
from mergekit_lab.runs.finetune import declare_expert, plan_settings
from mergekit_lab.runs.merge import declare_merged
from mergekit_lab.runs.run import Run
from mergekit_lab.schema.check import build


def set_published_beside(run: Run, records: list[Record]) -> list[Beside]:
    """The tables of papers that the run names, with what it measured."""
    axes = {axis: run.choices[axis] for axis in ("backbone", "finetuning", "optimizer")}
    measured = _Measured(run, records)
    holds = partial(have_settings, run)
    return [
        row
        for name in run.plain["published"]
        for row in set_beside(name, measured, axes, holds, run.tasks, read_protocol(run, name))
    ]


def read_protocol(run: Run, name: str) -> Protocol:
    """The settings that the papers print for the experiments of a table, and those that are our own choice."""
    experiments = {stem for stem, tables in _list_tables().items() if name in tables}
    if run.choices.get("experiment") in experiments:
        experiments = {run.choices["experiment"]}
    printed: set[str] = set()
    ours: dict[str, str] = {}
    for line in read_protocols():
        if any(map(line.is_of, experiments)) and have_settings(run, line.when):
            printed.discard(line.key)
            ours.pop(line.key, None)
            if not line.is_ours:
                printed.add(line.key)
            elif line.key.partition(".")[0] in run.cfg and not line.key.startswith(("analysis", "published")):
                why = line.source.partition(":")[2].strip()
                ours[line.key] = f"{read_setting(run, line.key)}" + (f" ({why})" if why else "")
    return Protocol(frozenset(printed), ours)


@cache
def _list_tables() -> dict[str, list[str]]:
    """The tables that each shipped experiment sets beside its results."""
    tables = {}
    for file in (find_conf_dir() / "experiment").glob("*.yaml"):
        content: Any = OmegaConf.load(file)
        tables[file.stem] = list(content.get("published") or ())
    return tables


def have_settings(run: Run, when: str) -> bool:
    """Whether the run has the settings `key=value …`. `key?=value` counts only if the run has the key."""
    for pair in when.split():
        key, _, value = pair.partition("=")
        setting = read_setting(run, key.removesuffix("?"))
        if not (is_equal(setting, value) or (key.endswith("?") and setting is None)):
            return False
    return True


def read_setting(run: Run, key: str) -> Any:
    """A value of the configuration as the run uses it; `choice.GROUP` is the option chosen in a group."""
    if key == "backbone.weights" and isinstance(run.backbone, OpenClip) and run.backbone.source:
        return run.backbone.source.find_published_name()
    group, _, rest = key.partition(".")
    if group == "choice":
        return run.choices.get(rest)
    if group == "mergers":
        label, _, name = rest.partition(".")
        content = run.mergers[label].content if label in run.mergers else {}
        return OmegaConf.select(OmegaConf.create(dict(content)), name)
    return OmegaConf.select(run.cfg, key)


def is_equal(value: Any, text: str) -> bool:
    """Whether a configuration's value equals a condition's text, such as `1e-5`, `[0.1,1.0]` or `None`."""
    if isinstance(value, list | ListConfig):
        texts = text.strip("[]").split(",") if text != "[]" else []
        return len(texts) == len(value) and all(map(is_equal, value, texts))
    if isinstance(value, bool):
        return str(value).lower() == text
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return str(value) == text


class _Measured:
    """The run's own number for a row and column of a published table, in the column's unit; None if unknown.

    Columns:
    - `average`, `normalized` or a task: percent.
    - `steps_per_second`, `gigabytes`: of training an expert, mean over tasks.
    - `merge_seconds`: the time that a merge took.

    Rows are mergers and models, or:
    - `training_seconds`: the time of an expert's steps, without loading, validation and writing.
    - `ks_distance` (percent), `mean_log_likelihood`: of a Laplace distribution fitted to task vectors, if the
      analysis task_vectors has been run.
    """

    def __init__(self, run: Run, records: list[Record]) -> None:
        self.run = run
        self.rows: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            name = {"expert": "experts"}.get(record.kind, record.kind)
            self.rows[record.merger or name].append(record)

    def __call__(self, row: str, column: str) -> float | None:
        if column == "merge_seconds":
            artifact = self.run.find(declare_merged(self.run, row)) if row in self.run.mergers else None
            return float(artifact.info["wall_seconds"]) if artifact else None
        tasks = [task for task in self.run.tasks if column in ("average", task)]
        unit, values = 1, list[float | None]()
        if row in ("training_seconds", "ks_distance", "mean_log_likelihood"):
            values = [self._read_expert(task, row) for task in tasks]
        elif column in ("steps_per_second", "gigabytes"):
            values = [self._read_cost(task, column) for task in self.run.tasks] if row == "experts" else []
        else:
            members = [r for r in self.rows.get(row, []) if column == "normalized" or r.task in tasks]
            values = [record.normalized if column == "normalized" else record.value for record in members]
            unit = 100
        known = [value for value in values if value is not None]
        return unit * sum(known) / len(known) if known else None

    def _read_expert(self, task: str, what: str) -> float | None:
        if what == "training_seconds":
            speed = self._read_cost(task, "steps_per_second")
            return plan_settings(self.run, task).steps / speed if speed else None
        fit = self._fits.get(task)
        return None if fit is None else float(fit[what]) * (100 if what == "ks_distance" else 1)

    @cached_property
    def _fits(self) -> dict[str, Any]:
        """The Laplace distribution fitted to each expert's task vector, by task."""
        asked = isinstance(build(self.run.cfg.analysis, Analysis), TaskVectors)
        artifact = self.run.find(declare_analysis(self.run)) if asked else None
        fits = json.loads(artifact.find_file(DATA).read_text())["fits"] if artifact else {}
        return {task: fit["laplace"] for task, fit in fits.items()}

    def _read_cost(self, task: str, column: str) -> float | None:
        cost = self.run.need(declare_expert(self.run, task)).info.get(column)
        return None if cost is None else float(cost)
