"""The style that all figures share, and the steps of drawing one; `names` has the looks of mergers."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130

_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.numpoints": 1,
    "axes.formatter.limits": (-5, 6),
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "pdf.fonttype": 42,  # journals refuse Type 3
    "svg.hashsalt": "mergekit_lab",  # the same bytes for the same figure
}


def make_title(group: Sequence[str], what: str) -> str:
    """What a figure shows, after the group it is of, if there is one."""
    return ": ".join(filter(None, (" / ".join(filter(None, group)), what)))


def shorten(name: str, limit: int = 28) -> str:
    """A name of at most `limit` characters."""
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def lighten(color: str) -> str:
    """A paler one of the same hue; `color` is `#RRGGBB`."""
    return "#" + "".join(f"{round(255 - 0.45 * (255 - int(color[i : i + 2], 16))):02X}" for i in (1, 3, 5))


def add_heading(figure: "Figure", text: str) -> None:
    """The figure's own title, above its axes on the left."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")


def add_legend(figure: "Figure", handles: Sequence[Any], labels: Sequence[str]) -> None:
    """One legend below all axes, in as few even lines as the figure's width has room for."""
    names = [shorten(label) for label in labels]
    widest = max(1, min(6, int(figure.get_figwidth() * 10 / (6 + max(map(len, names), default=0)))))
    lines = math.ceil(len(names) / widest) or 1
    figure.legend(handles, names, loc="outside lower center", ncols=math.ceil(len(names) / lines) or 1)


def place_labels(axes: "Axes", points: Sequence[tuple[float, float, str]], **style: Any) -> None:
    """Write names next to points without overlaps while there is room. Call it last.

    A name that has no room at its point stands farther off, at the end of a thin line.
    """
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    inside = axes.get_window_extent()
    taken = []
    for x, y, _ in points:
        left, below = axes.transData.transform((x, y))
        taken.append(Bbox.from_bounds(left - 5, below - 5, 10, 10))
    for x, y, text in points:
        best: tuple[int, Any, Any] | None = None
        for far in (1, 2, 3, 4):
            for across, up in ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1)):
                offset = (far * 7 * across, (far + (not across)) * 5 * up)
                note = axes.annotate(
                    text, (x, y), xytext=offset, textcoords="offset points",
                    ha={1: "left", -1: "right", 0: "center"}[across], va="bottom" if up > 0 else "top",
                    arrowprops={"arrowstyle": "-", "linewidth": 0.6, "color": "#777777"} if far > 1 else None,
                    **style,
                )  # fmt: skip
                note.set_in_layout(False)
                box = note.get_window_extent() if far == 1 else measure(note)
                outside = not (inside.contains(*box.min) and inside.contains(*box.max))
                wrong = 2 * outside + sum(box.overlaps(other) for other in taken)
                if best is None or wrong < best[0]:
                    if best is not None:
                        best[1].remove()
                    best = (wrong, note, box)
                else:
                    note.remove()
                if wrong == 0:
                    break
            if best is not None and best[0] == 0:
                break
        assert best is not None
        taken.append(best[2])


def measure(note: Any) -> Any:
    """Where an annotation's text stands, its line left out."""
    from matplotlib.text import Text

    note.update_positions(note.figure._get_renderer())
    return Text.get_window_extent(note)


def label_log_axis(axis: Any) -> None:
    """Plain numbers on a logarithmic axis, whose own labels are formulas; call it when the data is there."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(MaxNLocator(6) if high < 10 * low else LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: "")


def label_percent_axis(axis: Any) -> None:
    """Label shares as per cent."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:.4g}")


def name_files(
    folder: Path, stem: str, groups: Sequence[tuple[str, ...]]
) -> list[tuple[Path, tuple[str, ...]]]:
    """A file for every group: numbered, so that equal names stay apart, and named for the reader."""
    if len(groups) == 1:
        return [(folder / f"{stem}.png", groups[0])]
    files = []
    for number, group in enumerate(groups, start=1):
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(group)).strip("-.")[:60]
        files.append((folder / (f"{stem}-{number}-{name}.png" if name else f"{stem}-{number}.png"), group))
    return files


@contextmanager
def open_panels(
    groups: Sequence[tuple[str, ...]], text: str, height: float
) -> Iterator[tuple["Figure", Sequence["Axes"]]]:
    """A panel of `height` inches for every group, in up to three columns, on common axes."""
    columns = len(groups) if len(groups) < 3 else 2 if len(groups) < 5 else 3
    lines = math.ceil(len(groups) / columns)
    with open_figure((8.5, 12.5, 16.0)[columns - 1], lines * height + 1.2) as figure:
        add_heading(figure, text)
        every = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
        for axes, group in zip(every, groups, strict=False):
            axes.set_title(make_title(group, ""))
        for axes in every[len(groups) :]:
            axes.set_axis_off()
        yield figure, every[: len(groups)]


@contextmanager
def open_figure(width: float, height: float) -> Iterator["Figure"]:
    """A figure in the style of all, of a size in inches; no window, no state of pyplot."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> Path:
    """Write `path`, a PNG, with an SVG and a PDF: the same bytes for the same figure.

    These two are for papers, whose captions say what a figure shows, so they have no title.
    """
    from matplotlib.transforms import Bbox

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    figure.set_layout_engine("none")  # where everything stands is known by now
    width, height = figure.get_size_inches()
    for text in figure.texts:
        if text.get_text() == figure.get_suptitle():
            height = text.get_window_extent().y0 / figure.dpi
            text.set_visible(False)
    below = Bbox.from_extents(0, 0, width, height)
    for kind, undated in (("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
        figure.savefig(path.with_suffix(f".{kind}"), metadata=undated, bbox_inches=below)
    return path
