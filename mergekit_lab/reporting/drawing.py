"""The look that all figures share, and the steps of drawing one.

Colors are Okabe and Ito's, told apart by readers with any color vision; past the seventh line the colors
repeat with another hatch or dash.
"""

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

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A5A5A")
HATCHES = ("", "///", "...")
DASHES = ("-", "--", ":")
MARKERS = "osD^vPX"
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
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def color(place: int) -> str:
    """The color of the line, bar or point at a place; they recur after the last."""
    return COLOURS[place % len(COLOURS)]


def title(group: Sequence[str], what: str) -> str:
    """What a figure shows, after the group it is of, if there is one."""
    return ": ".join(filter(None, (" / ".join(filter(None, group)), what)))


def short(name: str, limit: int = 28) -> str:
    """A name of at most `limit` characters."""
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def light(color: str) -> str:
    """A paler one of the same hue; `color` is `#RRGGBB`."""
    return "#" + "".join(f"{round(255 - 0.45 * (255 - int(color[i : i + 2], 16))):02X}" for i in (1, 3, 5))


def heading(figure: "Figure", text: str) -> None:
    """The figure's own title, above its axes on the left."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")


def legend(figure: "Figure", handles: Sequence[Any], labels: Sequence[str]) -> None:
    """One legend below all axes, in as few even lines as the figure's width has room for."""
    names = [short(label) for label in labels]
    widest = max(1, min(6, int(figure.get_figwidth() * 10 / (6 + max(map(len, names), default=0)))))
    lines = math.ceil(len(names) / widest) or 1
    figure.legend(handles, names, loc="outside lower center", ncols=math.ceil(len(names) / lines) or 1)


def log_labels(axis: Any) -> None:
    """Plain numbers on a logarithmic axis, whose own labels are formulas; call it when the data is there."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(MaxNLocator(6) if high < 10 * low else LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: "")


def percent_axis(axis: Any) -> None:
    """Label shares as per cent."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:.4g}")


def files(folder: Path, stem: str, groups: Sequence[tuple[str, ...]]) -> list[tuple[Path, tuple[str, ...]]]:
    """A file for every group: numbered, so that equal names stay apart, and named for the reader."""
    if len(groups) == 1:
        return [(folder / f"{stem}.png", groups[0])]
    files = []
    for number, group in enumerate(groups, start=1):
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(group)).strip("-.")[:60]
        files.append((folder / (f"{stem}-{number}-{name}.png" if name else f"{stem}-{number}.png"), group))
    return files


@contextmanager
def panels(
    groups: Sequence[tuple[str, ...]], text: str, height: float
) -> Iterator[tuple["Figure", Sequence["Axes"]]]:
    """A panel of `height` inches for every group, in up to three columns, on common axes."""
    columns = len(groups) if len(groups) < 3 else 2 if len(groups) < 5 else 3
    lines = math.ceil(len(groups) / columns)
    with new_figure((8.5, 12.5, 16.0)[columns - 1], lines * height + 1.2) as figure:
        heading(figure, text)
        places = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
        for axes, group in zip(places, groups, strict=False):
            axes.set_title(title(group, ""))
        for axes in places[len(groups) :]:
            axes.set_axis_off()
        yield figure, places[: len(groups)]


@contextmanager
def new_figure(width: float, height: float) -> Iterator["Figure"]:
    """A figure in the style of all, of a size in inches; no window, no state of pyplot."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> Path:
    """Write a PNG that is the same, byte for byte, for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, format="png", metadata={"Software": None})
    return path
