"""Figures of a report. One order and one look a merger in all of them; bars, rows and lines carry names."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergekit_lab.reporting import charts, drawing
from mergekit_lab.reporting.names import REFERENCE, Look, choose_looks, display_name
from mergekit_lab.reporting.tables import MISSING, Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[Mapping[str, float]]]
"""Expert's label → points {step, train_loss, val_loss?, val_accuracy?}; losses in nats, accuracy 0..1."""

Searches = Mapping[str, Sequence[Mapping[str, float]]]
"""Merger's label → points {coefficient, normalized, chosen}; `normalized` on validation (1.0: as good as
the experts), `chosen` true at the point taken."""

LINES_PER_FIGURE = 12


def draw_mergers(table: Table, folder: Path) -> list[Path]:
    """Bars of average and normalized accuracy per merger, one panel a group: `mergers.png`."""
    groups = [group for group in table.groups if any(_list_merged(table, group))]
    if not groups:
        return []
    heading = "Average and normalized accuracy of the merged models (%)"
    with drawing.open_panels(groups, heading, 0.8 + 0.46 * len(table.mergers)) as (figure, every):
        for axes, group in zip(every, groups, strict=True):
            _draw_bars(axes, table, group)
        drawing.add_legend(figure, *_explain_bars(table))
        path = drawing.save(figure, folder / "mergers.png")
    panels = [charts.chart_bars(table, group, drawing.make_title(group, "")) for group in groups]
    charts.save_charts(path, heading, panels)
    return [path]


def _draw_bars(axes: "Axes", table: Table, group: tuple[str, ...]) -> None:
    rows = {row.label: row for row in _list_merged(table, group)}
    looks = choose_looks(table.mergers)
    top = max(
        [
            1.0,
            *(
                (row.error_bar(measure) or (0.0, cell.mean))[1]
                for row in table.rows
                for measure, cell in (("average", row.average), ("normalized", row.normalized))
                if row.kind == "merged" and cell.mean is not None
            ),
        ]
    )
    for y, label in enumerate(table.mergers):
        if label not in rows:
            continue
        look = looks[label]
        for measure, cell, shift, color in (
            ("average", rows[label].average, -0.2, look.color),
            ("normalized", rows[label].normalized, 0.2, drawing.lighten(look.color)),
        ):
            if cell.mean is None:
                continue
            bar = rows[label].error_bar(measure)
            low, high = bar or (cell.mean, cell.mean)
            axes.barh(
                y + shift,
                cell.mean,
                0.38,
                color=color,
                hatch=look.hatch,
                edgecolor="white",
                xerr=[[max(cell.mean - low, 0.0)], [max(high - cell.mean, 0.0)]] if bar else None,
                error_kw={"elinewidth": 1.0, "capsize": 2.0},
            )
            axes.text(
                high + 0.01,
                y + shift,
                cell.text,
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                fontweight="bold" if cell.best else "normal",
            )
    for row in table.rows:
        if row.group == group and row.kind in _REFERENCES and row.average.mean is not None:
            axes.axvline(
                row.average.mean, color=REFERENCE.color, linewidth=1.2, linestyle=_REFERENCES[row.kind]
            )
    axes.set_yticks(
        range(len(table.mergers)), [drawing.shorten(display_name(label)) for label in table.mergers]
    )
    axes.set_ylim(len(table.mergers) - 0.5, -0.5)
    drawing.label_percent_axis(axes.xaxis)
    axes.set_xlim(0, top * (1.18 if any(row.average.sd is not None for row in rows.values()) else 1.09))
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelbottom=True, labelleft=True)


_REFERENCES: dict[str, Any] = {"zero_shot": ":", "expert": "-", "joint": "--"}


def _explain_bars(table: Table) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color="#5A5A5A"), Patch(color=drawing.lighten("#5A5A5A"))]
    labels = ["average", "normalized (÷ experts)"]
    for row in table.rows:
        name = f"{row.name}, average"
        if row.kind in _REFERENCES and row.average.mean is not None and name not in labels:
            handles.append(
                Line2D([], [], color=REFERENCE.color, linestyle=_REFERENCES[row.kind], linewidth=1.2)
            )
            labels.append(name)
    handles += [Line2D([], [], color="black", marker="|", linewidth=1.0)] * bool(explain_error_bars(table))
    return handles, [*labels, *filter(None, [explain_error_bars(table)])]


def explain_error_bars(table: Table) -> str:
    """Explain the error bars; empty if there are none."""
    merged = [row for row in table.rows if row.kind == "merged"]
    interval = any(row.interval for row in merged)
    deviation = any(cell.sd is not None for row in merged for cell in row.cells[-2:])
    said = ["95 % of the average"] * interval + ["standard deviation over seeds"] * deviation
    return ", ".join(said)


def draw_heat_maps(table: Table, folder: Path) -> list[Path]:
    """Model × task with numbers, one file a group: `heatmap.png` or `heatmap-1-sam.png`, ….

    All of them share one color scale.
    """
    values = [cell.mean for row in table.rows for cell in row.cells[:-2] if cell.mean is not None]
    paths = []
    for path, group in drawing.name_files(folder, "heatmap", table.groups):
        rows = [row for row in table.rows if row.group == group]
        width = 2.8 + 0.11 * max(len(drawing.shorten(row.name)) for row in rows) + 0.74 * len(table.tasks)
        longest = max(len(drawing.shorten(task)) for task in table.tasks)
        with drawing.open_figure(
            width=max(width, 5.0), height=1.4 + 0.36 * len(rows) + 0.06 * longest
        ) as figure:
            _draw_heat_map(figure, rows, table.tasks, min(values), max(values))
            title = drawing.make_title(group, f"Accuracy per task, {table.part} part (%)")
            drawing.add_heading(figure, title)
            paths.append(drawing.save(figure, path))
        charts.save_charts(
            path, title, [charts.chart_heat_map(rows, table.tasks, min(values), max(values), "")]
        )
    return paths


def _draw_heat_map(
    figure: "Figure", rows: Sequence[Row], tasks: Sequence[str], low: float, high: float
) -> None:
    import matplotlib

    axes = figure.subplots()
    colors = matplotlib.colormaps["cividis"].with_extremes(bad="#EEEEEE")
    grid = [[math.nan if cell.mean is None else cell.mean for cell in row.cells[:-2]] for row in rows]
    image: Any = axes.imshow(grid, cmap=colors, vmin=low, vmax=max(high, low + 1e-6), aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            dark = value < low + 0.42 * (high - low)
            axes.text(
                x,
                y,
                MISSING if math.isnan(value) else f"{100 * value:.1f}",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else "black",
            )
    axes.set_yticks(range(len(rows)), [drawing.shorten(row.name) for row in rows])
    axes.set_xticks(
        range(len(tasks)),
        [drawing.shorten(task) for task in tasks],
        rotation=35,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set_xticks([x - 0.5 for x in range(1, len(tasks))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, len(rows))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.set_axisbelow(False)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    bar: Any = figure.colorbar(image, ax=axes, pad=0.02)
    drawing.label_percent_axis(bar.ax.yaxis)
    bar.outline.set_visible(False)


def draw_radars(table: Table, folder: Path) -> list[Path]:
    """Of every merger the share of each expert's value that it keeps, tasks around a circle: `radar.png`.

    One file a group; the circle drawn dark is the experts. Needs three tasks.
    """
    if len(table.tasks) < 3:
        return []
    groups = [group for group in table.groups if any(_list_merged(table, group))]
    paths = []
    for path, group in drawing.name_files(folder, "radar", groups):
        experts = next((r for r in table.rows if r.group == group and r.kind == "expert"), None)
        if experts is None:
            continue
        with drawing.open_figure(7.5, 6.6) as figure:
            title = drawing.make_title(group, "Accuracy by task (% of the expert's)")
            drawing.add_heading(figure, title)
            axes = figure.subplots(subplot_kw={"projection": "polar"})
            merged = list(_list_merged(table, group))
            _draw_radar(axes, table, merged, experts)
            drawing.add_legend(figure, *axes.get_legend_handles_labels())
            paths.append(drawing.save(figure, path))
        charts.save_charts(path, title, [charts.chart_shares(table, merged, experts, "")])
    return paths


def _draw_radar(axes: Any, table: Table, rows: Sequence[Row], experts: Row) -> None:
    looks = choose_looks(table.mergers)
    angles = [2 * math.pi * i / len(table.tasks) for i in range(len(table.tasks) + 1)]
    axes.plot(angles, [1.0] * len(angles), color=REFERENCE.color, linewidth=1.2, label="experts")
    for row in rows:
        shares = [
            cell.mean / own.mean if cell.mean is not None and own.mean else math.nan
            for cell, own in zip(row.cells[:-2], experts.cells[:-2], strict=True)
        ]
        line = looks[row.label].line
        axes.plot(angles, [*shares, shares[0]], markersize=3.5, linewidth=1.3, label=row.name, **line)
    axes.set_theta_offset(math.pi / 2)
    axes.set_theta_direction(-1)
    axes.set_xticks(angles[:-1], [drawing.shorten(task, 16) for task in table.tasks])
    axes.set_ylim(bottom=0)
    drawing.label_percent_axis(axes.yaxis)


def draw_costs(table: Table, folder: Path) -> list[Path]:
    """Normalized accuracy over what a model cost in all, joined where nothing cheaper is better: `cost.png`.

    Points are the mergers of all groups. One panel has seconds; another the peak of an accelerator's memory
    while a model was made, where that was measured.
    """
    known = [
        row
        for row in table.rows
        if row.kind in ("merged", "joint") and row.seconds is not None and row.normalized.mean is not None
    ]
    costs = [
        ("seconds, experts included (log scale)", [(row.seconds or 0.0, row) for row in known]),
        ("peak memory in GiB (log scale)", [(row.peak_bytes / 2**30, row) for row in known if row.peak_bytes]),
    ]
    costs = [(name, points) for name, points in costs if len(points) > 1]
    if not costs:
        return []
    with drawing.open_figure(8.5 if len(costs) == 1 else 13.0, 5.2) as figure:
        heading = "Normalized accuracy (%) over what a model took"
        drawing.add_heading(figure, heading)
        panels = []
        for axes, (name, points) in zip(figure.subplots(1, len(costs), squeeze=False)[0], costs, strict=True):
            placed = [(x, row.normalized.mean or 0.0, row) for x, row in points]
            front = find_front([(x, y) for x, y, _ in placed])
            _draw_cost(axes, table, name, placed, front)
            panels.append(charts.chart_costs(table, placed, front, name))
        for axes, (_, points) in zip(figure.axes, costs, strict=True):
            named = [
                (x, row.normalized.mean or 0.0, drawing.shorten(" / ".join((*row.group, row.name))))
                for x, row in points
            ]
            drawing.place_labels(axes, named, fontsize=8)
        path = drawing.save(figure, folder / "cost.png")
    charts.save_charts(path, heading, panels)
    return [path]


def _draw_cost(
    axes: "Axes",
    table: Table,
    name: str,
    placed: Sequence[tuple[float, float, Row]],
    front: Sequence[tuple[float, float]],
) -> None:
    looks = choose_looks(table.mergers)
    for x, y, row in placed:
        look = looks.get(row.label, REFERENCE)
        axes.scatter([x], [y], s=60, color=look.color, marker=look.marker, zorder=3)
        if row.normalized.sd is not None:
            axes.errorbar([x], [y], yerr=[row.normalized.sd], color=look.color, linewidth=1.0, capsize=2.0)
    axes.plot(*zip(*front, strict=True), color="#888888", linewidth=1.0, linestyle="--", zorder=2)
    axes.set_xscale("log")
    axes.set_xlabel(name)
    axes.margins(x=0.15, y=0.1)
    drawing.label_log_axis(axes.xaxis)
    drawing.label_percent_axis(axes.yaxis)
    axes.grid()


def find_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (cost, value) those that no cheaper or equally cheap point equals or beats, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, value in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or value > front[-1][1]:
            front.append((cost, value))
    return front


def draw_training(groups: Mapping[str, Curves], folder: Path) -> list[Path]:
    """Losses and validation accuracy over steps, a line an expert, at most `LINES_PER_FIGURE` a file.

    `groups` maps a title ("" for none) to its curves. Files: `training.png`, or `training-1-…png`, ….
    """
    pages = []
    for title, curves in groups.items():
        drawn = [(label, points) for label, points in curves.items() if points]
        pages += [
            (title, dict(drawn[start : start + LINES_PER_FIGURE]))
            for start in range(0, len(drawn), LINES_PER_FIGURE)
        ]
    paths = []
    for (path, (title,)), (_, curves) in zip(
        drawing.name_files(folder, "training", [(title,) for title, _ in pages]), pages, strict=True
    ):
        measures = [
            measure
            for measure in _MEASURES
            if any(measure in point for points in curves.values() for point in points)
        ]
        with drawing.open_figure(width=(7.5, 7.5, 10.0, 12.5)[len(measures)], height=4.2) as figure:
            _draw_curves(figure, title, curves, measures)
            paths.append(drawing.save(figure, path))
        panels = [_chart_curves(curves, measure) for measure in measures]
        charts.save_charts(path, title or "Training curves", panels)
    return paths


def _chart_curves(curves: Curves, measure: str) -> charts.Chart:
    known = {name: [point for point in points if measure in point] for name, points in curves.items()}
    factor = 100.0 if measure == "val_accuracy" else 1.0
    series = {
        name: ([point["step"] for point in points], [factor * point[measure] for point in points])
        for name, points in known.items()
    }
    looks = {name: Look.numbered(number) for number, name in enumerate(curves)}
    logarithmic = _is_positive_loss(curves, measure)
    return charts.chart_lines(_MEASURES[measure], "step", "", series, looks, logarithmic=logarithmic)


def _is_positive_loss(curves: Curves, measure: str) -> bool:
    return measure != "val_accuracy" and all(
        point[measure] > 0 for points in curves.values() for point in points if measure in point
    )


_MEASURES = {
    "train_loss": "Training loss",
    "val_loss": "Validation loss",
    "val_accuracy": "Validation accuracy (%)",
}


def _draw_curves(figure: "Figure", title: str, curves: Curves, measures: Sequence[str]) -> None:
    panels = figure.subplots(1, max(len(measures), 1), squeeze=False)[0]
    lines: list[Any] = []
    if title:
        drawing.add_heading(figure, title)
    for axes, measure in zip(panels, measures, strict=False):
        lines = []
        for number, points in enumerate(curves.values()):
            known = [point for point in points if measure in point]
            lines += axes.plot(
                [point["step"] for point in known],
                [point[measure] for point in known],
                markersize=3.5,
                linewidth=1.5,
                **Look.numbered(number).line | {"marker": "o" if len(known) < 12 else ""},
            )
        if measure == "val_accuracy":
            drawing.label_percent_axis(axes.yaxis)
        elif _is_positive_loss(curves, measure):
            axes.set_yscale("log")
            drawing.label_log_axis(axes.yaxis)
        axes.set_title(_MEASURES[measure])
        axes.set_xlabel("step")
        axes.grid()
    drawing.add_legend(figure, lines, list(curves))


def draw_searches(groups: Mapping[str, Searches], order: Sequence[str], folder: Path) -> list[Path]:
    """Validation normalized accuracy over the coefficient, the chosen point ringed: `coefficients.png`.

    `groups` maps a title ("" for none) to its searches, a panel each; `order` lists the mergers as the
    table does.
    """
    groups = {
        title: {label: points for label, points in searches.items() if points}
        for title, searches in groups.items()
    }
    groups = {title: searches for title, searches in groups.items() if searches}
    if not groups:
        return []
    mergers = list(dict.fromkeys([*order, *(label for searches in groups.values() for label in searches)]))
    shown = [label for label in mergers if any(label in searches for searches in groups.values())]
    titles = [(title,) for title in groups]
    heading = "Normalized accuracy on validation (%) over the coefficient"
    with drawing.open_panels(titles, heading, 3.3) as (figure, panels):
        handles: dict[str, Any] = {}
        looks = choose_looks(mergers)
        drawn = [_chart_searches(title, searches, looks) for title, searches in groups.items()]
        for axes, searches in zip(panels, groups.values(), strict=True):
            for label in (label for label in mergers if label in searches):
                handles[label] = _draw_search(axes, searches[label], looks[label])
            drawing.label_percent_axis(axes.yaxis)
            axes.set_xlabel("coefficient α (ringed: chosen)")
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.grid()
        drawing.add_legend(
            figure, [handles[label] for label in shown], [display_name(label) for label in shown]
        )
        path = drawing.save(figure, folder / "coefficients.png")
    charts.save_charts(path, heading, drawn)
    return [path]


def _chart_searches(title: str, searches: Searches, looks: Mapping[str, Look]) -> charts.Chart:
    ordered = {
        display_name(label): sorted(searches[label], key=lambda point: point["coefficient"])
        for label in looks
        if label in searches
    }
    series = {
        name: ([p["coefficient"] for p in points], [100 * p["normalized"] for p in points])
        for name, points in ordered.items()
    }
    chosen = {name: [p["coefficient"] for p in points if p.get("chosen")] for name, points in ordered.items()}
    shown = {display_name(label): look for label, look in looks.items() if label in searches}
    return charts.chart_lines(
        title, "coefficient α (ringed: chosen)", "normalized (%)", series, shown, chosen=chosen
    )


def _draw_search(axes: "Axes", points: Sequence[Mapping[str, float]], look: Look) -> Any:
    ordered = sorted(points, key=lambda point: point["coefficient"])
    (line,) = axes.plot(
        [point["coefficient"] for point in ordered],
        [point["normalized"] for point in ordered],
        markersize=4.5,
        linewidth=1.5,
        **look.line,
    )
    chosen = [point for point in ordered if point.get("chosen")]
    axes.plot(
        [point["coefficient"] for point in chosen],
        [point["normalized"] for point in chosen],
        linestyle="",
        marker="o",
        markersize=11,
        markerfacecolor="none",
        markeredgewidth=1.8,
        color=look.color,
    )
    return line


def _list_merged(table: Table, group: tuple[str, ...]) -> Iterator[Row]:
    return (row for row in table.rows if row.group == group and row.kind == "merged")
