"""A run's report, and the comparison of many runs: files in, views out.

`write_report` leaves in a run's folder both the views (`summary.md`, `leaderboard.csv`, `leaderboard.tex`,
`figures/`, `report.html`) and all that is needed to draw them again (`records.jsonl`, `curves.json`,
`searches.json`, `timings.json`, `samples.npz`, `published.json`, `config.yaml`).
`compare` reads such folders and nothing else.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergekit_lab.reporting import html, plots
from mergekit_lab.reporting.bootstrap import Samples, with_intervals
from mergekit_lab.reporting.plots import Curves, Searches
from mergekit_lab.reporting.published import Beside, published_markdown, united
from mergekit_lab.reporting.records import Failure, Record, Timing, deduplicate, write_records, write_text
from mergekit_lab.reporting.run_files import RunFiles, read_run
from mergekit_lab.reporting.slices import (
    Slice,
    slice_csv,
    slice_latex,
    slice_markdown,
    sliced,
    table_csv,
    table_latex,
)
from mergekit_lab.reporting.summary import describe
from mergekit_lab.reporting.tables import AXES, Table, comparison_table, markdown_text, to_markdown

_OUR_FIGURES = re.compile(r"(mergers|coefficients|cost|(heatmap|radar|training)(-\d+.*)?)\.png")


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


def write_report(
    out_dir: Path | str,
    records: Iterable[Record],
    *,
    curves: Curves,
    searches: Searches,
    config_yaml: str,
    timings: Mapping[str, Timing],
    failures: Sequence[Failure] = (),
    samples: Samples | None = None,
    published: Sequence[Beside] = (),
    title: str,
) -> ReportPaths:
    """Write one run's records and every view of them into `out_dir`.

    Args:
        records: this run's evaluations; one that is repeated counts once.
        curves: training curves by expert, see `plots.Curves`; empty where nothing was trained.
        searches: coefficient searches by merger, see `plots.Searches`.
        config_yaml: the composed configuration; shown as it is, so it must hold no secret.
        timings: by stage, in the order run.
        failures: what gave no result.
        samples: what every test sample contributed, by evaluation key; averages get intervals from it.
        published: published numbers with ours.
    """
    folder = Path(out_dir)
    found = RunFiles(
        folder, deduplicate(records), curves, searches, timings, samples or {}, published, config_yaml
    )
    found.write()
    return _write_views(
        folder,
        found.records,
        {"": curves},
        {"": searches},
        configs={"": config_yaml},
        timings=timings,
        failures=failures,
        samples=found.samples,
        published=published,
        title=title,
        analyzed={"": folder},
    )


def compare(
    run_dirs: Iterable[Path | str],
    out_dir: Path | str,
    *,
    failures: Sequence[Failure] = (),
    title: str = "Comparison",
) -> ReportPaths:
    """Write one report over the runs in `run_dirs`, from their files alone.

    A folder that holds `failure.json` ({"overrides": […], "error": "…"}), has no records or cannot be
    read is listed among the failures, and nothing of it enters the table. Never raises for such a folder.
    """
    runs: list[RunFiles] = []
    failed = list(failures)
    for run_dir in map(Path, run_dirs):
        outcome = read_run(run_dir)
        if isinstance(outcome, Failure):
            failed.append(outcome)
        else:
            runs.append(outcome)
    names = _short_names([run.folder for run in runs])
    titles = _group_titles(runs)
    timings: dict[str, Timing] = {}
    for run in runs:
        for stage, timing in run.timings.items():
            total = timings.get(stage, Timing(0.0))
            timings[stage] = Timing(
                total.seconds + timing.seconds, total.computed + timing.computed, total.reused + timing.reused
            )
    return _write_views(
        Path(out_dir),
        deduplicate(record for run in runs for record in run.records),
        _grouped([(group, name, run.curves) for group, name, run in zip(titles, names, runs, strict=True)]),
        _grouped([(group, name, run.searches) for group, name, run in zip(titles, names, runs, strict=True)]),
        configs=dict(zip(names, (run.config_yaml for run in runs), strict=True)),
        timings=timings,
        failures=failed,
        samples={key: values for run in runs for key, values in run.samples.items()},
        published=united(row for run in runs for row in run.published),
        title=title,
        analyzed=dict(zip(names, (run.folder for run in runs), strict=True)),
    )


def write_slice(folder: Path, records: Iterable[Record], table: str, measure: str) -> Slice:
    """`slice.md`, `slice.csv` and `slice.tex` in the folder; see `sliced`."""
    found = sliced(records, table, measure)
    write_text(folder / "slice.md", slice_markdown(found))
    write_text(folder / "slice.csv", slice_csv(found))
    write_text(folder / "slice.tex", slice_latex(found))
    return found


def _write_views(
    folder: Path,
    records: list[Record],
    curves: Mapping[str, Curves],
    searches: Mapping[str, Searches],
    *,
    configs: Mapping[str, str],
    timings: Mapping[str, Timing],
    failures: Sequence[Failure],
    samples: Samples,
    published: Sequence[Beside],
    title: str,
    analyzed: Mapping[str, Path],
) -> ReportPaths:
    table = with_intervals(comparison_table(records), samples)
    summary = describe(table, records, failures)
    paths = ReportPaths(
        folder / "records.jsonl", folder / "summary.md", folder / "report.html", (), table, tuple(failures)
    )
    write_records(paths.records, records)
    write_text(paths.summary, _markdown(title, summary, table, published, records, timings, failures))
    write_text(folder / "leaderboard.csv", table_csv(table))
    write_text(folder / "leaderboard.tex", table_latex(table))
    figures = _draw(folder / "figures", table, curves, searches)
    write_text(
        paths.html,
        html.page(
            title,
            summary,
            table,
            published=published,
            figures=[*figures, *_analyses(analyzed)],
            records=records,
            timings=timings,
            failures=failures,
            configs=configs,
        ),
    )
    return replace(paths, figures=tuple(figure.path for figure in figures))


def _draw(
    folder: Path, table: Table, curves: Mapping[str, Curves], searches: Mapping[str, Searches]
) -> list[html.Figure]:
    if folder.is_dir():
        for path in folder.iterdir():
            if _OUR_FIGURES.fullmatch(path.name):
                path.unlink()  # a report that has fewer figures than its predecessor must not show old ones
    heat_maps = [
        html.Figure(
            path, f"Accuracy of every model on every task{_of(group)}; the numbers are in the leaderboard."
        )
        for path, group in zip(plots.heat_maps(table, folder), table.groups, strict=True)
    ]
    training = plots.training_figures(curves, folder)
    return [
        *(
            html.Figure(
                path, "Average and normalized accuracy of every merger; the numbers are in the leaderboard."
            )
            for path in plots.merger_figures(table, folder)
        ),
        *heat_maps,
        *(
            html.Figure(
                path,
                "Validation accuracy, normalized by the experts', over the merging coefficient; "
                "the chosen coefficients are ringed and stand in the leaderboard.",
            )
            for path in plots.coefficient_figures(searches, table.mergers, folder)
        ),
        *(
            html.Figure(
                path,
                "Normalized accuracy over the seconds that a model took in all, and over memory where it was "
                "measured; nothing cheaper is better than those on the dashed line.",
            )
            for path in plots.cost_figure(table, folder)
        ),
        *(
            html.Figure(
                path,
                "Of every merger the share of each expert's accuracy that it keeps, tasks around a circle.",
                folded=len(table.groups) > 1,
            )
            for path in plots.radar_figures(table, folder)
        ),
        *(
            html.Figure(
                path,
                "Training curves of the experts: losses and validation accuracy over steps.",
                folded=len(training) > 2,
            )
            for path in training
        ),
    ]


def _analyses(folders: Mapping[str, Path]) -> list[html.Figure]:
    """Figures of analyses that lie in the folders of runs; of several runs they are folded."""
    return [
        html.Figure(
            path,
            f"Analysis {path.stem}{f' of {run}' if run else ''}; its numbers are in analysis/{path.stem}.json.",
            folded=bool(run),
        )
        for run, folder in folders.items()
        for path in sorted((folder / "analysis").glob("*.png"))
    ]


def _of(group: tuple[str, ...]) -> str:
    return f" ({', '.join(group)})" if group else ""


def _markdown(
    title: str,
    summary: str,
    table: Table,
    published: Sequence[Beside],
    records: Sequence[Record],
    timings: Mapping[str, Timing],
    failures: Sequence[Failure],
) -> str:
    parts = [f"# {markdown_text(title)}", markdown_text(summary)]
    if table.rows:
        parts.append(to_markdown(table).rstrip("\n"))
    if published:
        parts.append(published_markdown(published))
    parts += ["## Time and cache", html.cache_sentence(records)]
    if timings:
        parts.append(
            "\n".join(
                f"- {markdown_text(stage)}: {html.duration(timing.seconds)}, {timing.computed} computed, "
                f"{timing.reused} reused"
                for stage, timing in timings.items()
            )
        )
    if failures:
        parts.append("## Failures")
        parts.append(
            "\n".join(
                markdown_text(f"- {failure.run} {' '.join(failure.overrides)}: {_first_line(failure.error)}")
                for failure in failures
            )
        )
    return "\n\n".join(parts) + "\n"


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "no message")


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names; their whole paths where two names are equal."""
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _group_titles(runs: Sequence[RunFiles]) -> list[str]:
    """What tells a run's experts from those of other runs: its axes and seeds, where they vary."""
    described = [
        [
            ", ".join(dict.fromkeys(str(getattr(record, axis)) for record in run.records))
            for axis in (*AXES, "seed")
        ]
        for run in runs
    ]
    vary = [len(set(column)) > 1 for column in zip(*described, strict=True)]
    return [
        " / ".join(
            (f"seed {value}" if axis == "seed" else value)
            for axis, value, shown in zip((*AXES, "seed"), values, vary, strict=True)
            if shown
        )
        for values in described
    ]


def _grouped(runs: Iterable[tuple[str, str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Series by group and label; two of one label that differ are told apart by their run's name."""
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for group, run, series in runs:
        for label, points in series.items():
            name = label if groups[group].setdefault(label, points) == points else f"{label} ({run})"
            groups[group][name] = points
    return groups
