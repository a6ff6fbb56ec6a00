"""A run's report, and the comparison of many runs: files in, views out.

`write_report` leaves in a run's folder both the views (`summary.md`, `leaderboard.csv`, `leaderboard.tex`,
`figures/`, `report.html`) and all that is needed to draw them again (`records.jsonl`, `curves.json`,
`searches.json`, `timings.json`, `samples.npz`, `published.json`, `config.yaml`, `origin.json`).
`compare` reads such folders and nothing else.
"""

import logging
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from mergekit_lab.reporting import plots
from mergekit_lab.reporting.bootstrap import add_intervals
from mergekit_lab.reporting.checks import find_warnings
from mergekit_lab.reporting.cross_table import CrossTable, tabulate_across
from mergekit_lab.reporting.drawing import Figure
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.origin import Origin, list_commands
from mergekit_lab.reporting.page import Page, render_page, render_summary
from mergekit_lab.reporting.plots import Curves, Searches
from mergekit_lab.reporting.published import unite
from mergekit_lab.reporting.records import Failure, Record, Timing, deduplicate, write_records, write_text
from mergekit_lab.reporting.run_files import RunFiles, read_run
from mergekit_lab.reporting.summary import describe
from mergekit_lab.reporting.tables import AXES, Table
from mergekit_lab.reporting.writing import to_csv, to_latex, to_markdown

log = logging.getLogger(__name__)

_OUR_FIGURES = re.compile(
    r"(mergers|coefficients|cost|(heatmap|shares|training)(-\d+.*)?)\.(png|svg|pdf|vl\.json)"
)


@dataclass(frozen=True)
class ReportPaths:
    """Where a report's files are, and its table for printing or tracking."""

    records: Path
    summary: Path
    html: Path
    figures: tuple[Path, ...]
    table: Table
    failures: tuple[Failure, ...] = ()
    """What gave no result, as far as the report knows."""


def write_report(run: RunFiles, title: str) -> ReportPaths:
    """Write one run's records, what its views are drawn from, and every view, into its folder."""
    run.write()
    return _write_views(run.folder, {"": run}, (), title, run.origin)


def compare(
    run_dirs: Iterable[Path | str],
    out_dir: Path | str,
    *,
    origin: Origin | None = None,
    title: str = "Comparison",
) -> ReportPaths:
    """Write one report over the runs in `run_dirs`, only from their files.

    A folder that holds `failure.json` ({"overrides": […], "error": "…"}), has no records or cannot be
    read is listed among the failures, and nothing of it enters the table. Never raises for such a folder.

    Args:
        origin: how the comparison itself is made; the runs' own origins are in their folders.
    """
    outcomes = [read_run(run_dir) for run_dir in map(Path, run_dirs)]
    runs = [outcome for outcome in outcomes if isinstance(outcome, RunFiles)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    names = [run.folder.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    return _write_views(Path(out_dir), dict(zip(names, runs, strict=True)), failures, title, origin)


def write_cross_table(folder: Path, records: Iterable[Record], table: str, measure: str) -> CrossTable:
    """`table.md`, `table.csv` and `table.tex` in the folder; see `tabulate_across`."""
    crossed = tabulate_across(records, table, measure)
    for kind, write in (("md", to_markdown), ("csv", to_csv), ("tex", to_latex)):
        write_text(folder / f"table.{kind}", write(crossed))
    return crossed


def _write_views(
    folder: Path, runs: Mapping[str, RunFiles], failures: Sequence[Failure], title: str, origin: Origin | None
) -> ReportPaths:
    """One report over runs by name."""
    records = deduplicate(record for run in runs.values() for record in run.records)
    samples = {key: values for run in runs.values() for key, values in run.samples.items()}
    table = add_intervals(build_table(records), samples)
    groups = _title_groups(list(runs.values()))
    named = list(zip(groups, runs.items(), strict=True))
    curves = _group_series((group, name, run.curves) for group, (name, run) in named)
    searches = _group_series((group, name, run.searches) for group, (name, run) in named)
    figures = _draw_figures(folder / "figures", table, curves, searches)
    published, notes = unite((run.config_yaml, run.published) for run in runs.values())
    page = Page(
        title,
        describe(table, records, failures),
        table,
        records,
        warnings=find_warnings(records),
        published=published,
        published_notes=notes,
        figures=[*figures, *_list_analyses({name: run.folder for name, run in runs.items()})],
        timings=_add_timings(runs.values()),
        failures=failures,
        configs={name: run.config_yaml for name, run in runs.items()},
        origin=origin,
        origins={name: run.origin for name, run in runs.items() if name and run.origin},
        commands=list_commands((run.origin, run.records) for run in runs.values()),
    )
    for warning in page.warnings:
        log.warning("%s", warning)
    paths = ReportPaths(
        folder / "records.jsonl",
        folder / "summary.md",
        folder / "report.html",
        tuple(figure.path for figure in figures),
        table,
        tuple(failures),
    )
    write_records(paths.records, records)
    write_text(paths.summary, render_summary(page))
    write_text(folder / "leaderboard.csv", to_csv(table))
    write_text(folder / "leaderboard.tex", to_latex(table))
    write_text(paths.html, render_page(page))
    return paths


def _add_timings(runs: Iterable[RunFiles]) -> dict[str, Timing]:
    total: dict[str, Timing] = {}
    for stage, timing in (item for run in runs for item in run.timings.items()):
        before = total.get(stage, Timing(0.0))
        total[stage] = Timing(*map(operator.add, astuple(before), astuple(timing)))
    return total


def _draw_figures(
    folder: Path, table: Table, curves: Mapping[str, Curves], searches: Mapping[str, Searches]
) -> list[Figure]:
    if folder.is_dir():
        for path in folder.iterdir():
            if _OUR_FIGURES.fullmatch(path.name):
                path.unlink()  # a report that has fewer figures than its predecessor must not show old ones
    return [
        *plots.draw_mergers(table, folder),
        *plots.draw_heat_maps(table, folder),
        *plots.draw_searches(searches, table.mergers, folder),
        *plots.draw_costs(table, folder),
        *plots.draw_shares(table, folder),
        *plots.draw_training(curves, folder),
    ]


def _list_analyses(folders: Mapping[str, Path]) -> list[Figure]:
    """Figures of analyses that lie in the folders of runs; of several runs they are folded."""
    return [
        Figure(
            path,
            f"Analysis {path.stem}{f' of {run}' if run else ''}; its numbers are in analysis/{path.stem}.json.",
            folded=bool(run),
        )
        for run, folder in folders.items()
        for path in sorted((folder / "analysis").glob("*.png"))
        if path.is_file()
    ]


def _title_groups(runs: Sequence[RunFiles]) -> list[str]:
    """What tells a run's experts from those of other runs: its axes and seeds, where they vary."""
    values = {
        axis: [", ".join(dict.fromkeys(str(getattr(record, axis)) for record in run.records)) for run in runs]
        for axis in (*AXES, "seed")
    }
    values["seed"] = [f"seed {seeds}" for seeds in values["seed"]]
    vary = [of_runs for of_runs in values.values() if len(set(of_runs)) > 1]
    return [" / ".join(of_runs[i] for of_runs in vary) for i in range(len(runs))]


def _group_series(runs: Iterable[tuple[str, str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Series by group and label; two of one label that differ are told apart by their run's name."""
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for group, run, series in runs:
        for label, points in series.items():
            name = label if groups[group].setdefault(label, points) == points else f"{label} ({run})"
            groups[group][name] = points
    return groups
