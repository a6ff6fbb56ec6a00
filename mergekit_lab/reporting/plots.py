"""The figures of a report, as files. A merger has the same place and look in all of them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mergekit_lab.reporting import charts, figures
from mergekit_lab.reporting.drawing import Figure, make_title, name_files, save_figure
from mergekit_lab.reporting.encoding import Chart
from mergekit_lab.reporting.names import REFERENCE, Look, choose_looks, display_name
from mergekit_lab.reporting.tables import Row, Table

Curves = Mapping[str, Sequence[Mapping[str, float]]]
"""Expert's label → points {step, train_loss, val_loss?, val_accuracy?}; losses in nats, accuracy 0..1."""

Searches = Mapping[str, Sequence[Mapping[str, float]]]
"""Merger's label → points {coefficient, normalized, chosen}; `normalized` on validation (1.0: as good as
the experts), `chosen` true at the point taken."""

LINES_PER_FIGURE = 12


def draw_mergers(table: Table, folder: Path) -> list[Figure]:
    """Bars of average and normalized accuracy per merger, one panel per group: `mergers.png`."""
    groups = [group for group in table.groups if any(_list_merged(table, group))]
    bars = explain_error_bars(table)
    panels = [charts.chart_bars(table, group, make_title(group, ""), bars) for group in groups]
    heading = "Average and normalized accuracy of the merged models (%)"
    text = "Average and normalized accuracy of every merger; the numbers are in the leaderboard."
    text += f" Lines at the bars' ends: {bars}." if bars else ""
    return _draw_panels(folder / "mergers.png", heading, panels, text)


def explain_error_bars(table: Table) -> str:
    """Explain the error bars; empty if there are none."""
    merged = [row for row in table.rows if row.kind == "merged"]
    interval = any(row.interval for row in merged)
    deviation = any(cell.sd is not None for row in merged for cell in row.cells[-2:])
    parts = ["95 % of the average"] * interval + ["standard deviation over seeds"] * deviation
    return ", ".join(parts)


def draw_heat_maps(table: Table, folder: Path) -> list[Figure]:
    """Model × task with numbers, one file a group: `heatmap.png` or `heatmap-1-sam.png`, ….

    All of them share one color scale.
    """
    values = [cell.mean for row in table.rows for cell in row.cells[:-2] if cell.mean is not None]
    maps = []
    for path, group in name_files(folder, "heatmap", table.groups):
        rows = [row for row in table.rows if row.group == group]
        panel = charts.chart_heat_map(rows, table.tasks, min(values), max(values))
        title = make_title(group, f"Accuracy per task, {table.part} part (%)")
        of = f" ({', '.join(group)})" if group else ""
        text = f"Accuracy of every model on every task{of}; the numbers are in the leaderboard."
        maps.append(Figure(save_figure(path, title, [panel]), text))
    return maps


def draw_shares(table: Table, folder: Path) -> list[Figure]:
    """Of every merger the share of each expert's value that it keeps, by task: `shares.png`.

    One file a group. Needs two tasks: one task's share is the normalized value.
    """
    groups = [group for group in table.groups if any(_list_merged(table, group))] if table.tasks[1:] else []
    text = "Of every merger the share of each expert's accuracy that it keeps, by task."
    shares = []
    for path, group in name_files(folder, "shares", groups):
        experts = next((r for r in table.rows if r.group == group and r.kind == "expert"), None)
        if experts is None:
            continue
        panel = charts.chart_shares(table, list(_list_merged(table, group)), experts)
        title = make_title(group, "Accuracy by task (% of the expert's)")
        shares.append(Figure(save_figure(path, title, [panel]), text, folded=len(table.groups) > 1))
    return shares


def draw_costs(table: Table, folder: Path) -> list[Figure]:
    """Normalized accuracy over what a model cost in all, joined where nothing cheaper is better: `cost.png`.

    A panel a group has seconds; another the peak of an accelerator's memory while a model was made, where that
    was measured. The line is that of all groups.
    """
    known = [
        row
        for row in table.rows
        if row.kind in ("merged", "joint") and row.seconds is not None and row.normalized.mean is not None
    ]
    costs = {
        "seconds, experts included (log scale)": [(row.seconds or 0.0, row) for row in known],
        "peak memory in GiB (log scale)": [(row.peak_bytes / 2**30, row) for row in known if row.peak_bytes],
    }
    costs = {name: points for name, points in costs.items() if len(points) > 1}
    looks = choose_looks(table.mergers)
    names = {row.name: looks.get(row.label, REFERENCE) for row in known}
    panels = []
    for group in table.groups:
        for name, points in costs.items():
            placed = [(x, row.normalized.mean or 0.0) for x, row in points]
            limits = [(min(column), max(column)) for column in zip(*placed, strict=True)]
            own = [(x, row) for x, row in points if row.group == group]
            if own:
                title, front = make_title(group, ""), find_front(placed)
                panels.append(charts.chart_costs(title, own, names, front, name, limits))
    heading = "Normalized accuracy (%) over what a model took"
    text = (
        "Normalized accuracy over the seconds that a model took in all, and over memory where it was "
        "measured; nothing cheaper is better than those on the dashed line."
    )
    return _draw_panels(folder / "cost.png", heading, panels, text, 2 if len(costs) == 2 else 3)


def find_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (cost, value) those that no cheaper or equally cheap point equals or beats, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, value in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or value > front[-1][1]:
            front.append((cost, value))
    return front


def draw_training(groups: Mapping[str, Curves], folder: Path) -> list[Figure]:
    """Losses and validation accuracy over steps, a line per expert, at most `LINES_PER_FIGURE` a file.

    `groups` maps a title ("" for none) to its curves. Files: `training.png`, or `training-1-…png`, ….
    """
    pages = []
    for title, curves in groups.items():
        drawn = [(label, points) for label, points in curves.items() if points]
        pages += [
            (title, dict(drawn[start : start + LINES_PER_FIGURE]))
            for start in range(0, len(drawn), LINES_PER_FIGURE)
        ]
    text = "Training curves of the experts: losses and validation accuracy over steps."
    files = name_files(folder, "training", [(title,) for title, _ in pages])
    drawn_pages = []
    for (path, (title,)), (_, curves) in zip(files, pages, strict=True):
        every = [point for points in curves.values() for point in points]
        panels = [_chart_curves(curves, m) for m in _MEASURES if any(m in point for point in every)]
        png = save_figure(path, title or "Training curves", panels)
        drawn_pages.append(Figure(png, text, folded=len(pages) > 2))
    return drawn_pages


_MEASURES = {
    "train_loss": "Training loss",
    "val_loss": "Validation loss",
    "val_accuracy": "Validation accuracy (%)",
}


def _chart_curves(curves: Curves, measure: str) -> Chart:
    losses = measure != "val_accuracy"
    series = {}
    for name, every in curves.items():
        points = [point for point in every if measure in point]
        values = [point[measure] if losses else 100.0 * point[measure] for point in points]
        series[name] = [point["step"] for point in points], values
    return figures.chart_lines(_MEASURES[measure], "step", "", series, logarithmic=losses)


def draw_searches(groups: Mapping[str, Searches], order: Sequence[str], folder: Path) -> list[Figure]:
    """Validation normalized accuracy over the coefficient, the chosen point ringed: `coefficients.png`.

    `groups` maps a title ("" for none) to its searches, a panel each; `order` lists the mergers as the
    table does.
    """
    labels = [label for searches in groups.values() for label, points in searches.items() if points]
    looks = {label: look for label, look in choose_looks([*order, *labels]).items() if label in labels}
    panels = [
        _chart_searches(title, searches, looks) for title, searches in groups.items() if any(searches.values())
    ]
    heading = "Normalized accuracy on validation (%) over the coefficient"
    text = (
        "Validation accuracy, normalized by the experts', over the merging coefficient; the chosen "
        "coefficients are ringed and stand in the leaderboard."
    )
    return _draw_panels(folder / "coefficients.png", heading, panels, text)


def _chart_searches(title: str, searches: Searches, looks: Mapping[str, Look]) -> Chart:
    series, chosen = {}, {}
    for label in (label for label in looks if searches.get(label)):
        points = sorted(searches[label], key=lambda point: point["coefficient"])
        name = display_name(label)
        series[name] = [p["coefficient"] for p in points], [100 * p["normalized"] for p in points]
        chosen[name] = [p["coefficient"] for p in points if p.get("chosen")]
    shown = {display_name(label): look for label, look in looks.items()}
    return figures.chart_lines(
        title, "coefficient α (ringed: chosen)", "normalized (%)", series, shown, chosen=chosen
    )


def _draw_panels(
    path: Path, heading: str, panels: Sequence[Chart], text: str, columns: int = 3
) -> list[Figure]:
    """One figure of all panels; none without."""
    return [Figure(save_figure(path, heading, panels, columns), text)] if panels else []


def _list_merged(table: Table, group: tuple[str, ...]) -> Iterator[Row]:
    return (row for row in table.rows if row.group == group and row.kind == "merged")
