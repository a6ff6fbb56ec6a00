"""How reports show a merger: the name that papers use, and the same look in all figures of all reports.

Both depend only on the label, so a method has them in every report. Records, files of numbers and options keep
the labels.
"""

import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import cycle

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A5A5A")
"""Okabe and Ito's, which readers with any color vision tell apart."""
DASHES = ((1, 0), (6, 3), (2, 2), (6, 2, 2, 2), (8, 2, 2, 2, 2, 2), (1, 3))
"""Lengths in pixels, drawn and not in turn."""
MARKERS = ("circle", "square", "diamond", "triangle-down", "triangle-up", "cross", "triangle-left")
_STAR = "M0,-1L.23,-.31L.95,-.31L.36,.12L.59,.81L0,.38L-.59,.81L-.36,.12L-.95,-.31L-.23,-.31Z"

NAMES = {
    "task_arithmetic": "Task arithmetic",
    "ties": "TIES",
    "tsvm": "TSV-M",
    "epimer": "EpiMer",
    "dare": "DARE",
    "average": "Weight average",
    "fisher": "Fisher",
    "regmean": "RegMean",
    "wudi": "WUDI",
    "iso_c": "Iso-C",
    "iso_cts": "Iso-CTS",
    "adamerging": "AdaMerging",
    "breadcrumbs": "Breadcrumbs",
    "consensus": "Consensus TA",
    "della": "DELLA",
    "model_stock": "Model stock",
    "slerp": "SLERP",
    "nuslerp": "NuSLERP",
    "multislerp": "Multi-SLERP",
    "karcher": "Karcher mean",
    "sce": "SCE",
    "ram": "RAM",
    "nearswap": "NearSwap",
    "arcee_fusion": "Arcee Fusion",
    "passthrough": "Passthrough",
    "lines": "LiNeS",
    "pcb": "PCB",
    "doge": "DOGE-TA",
    "cat": "CAT",
    "regmean_plusplus": "RegMean++",
    "tsvc": "TSV-C",
    "emr": "EMR",
    "localize_stitch": "Localize-and-Stitch",
    "knots": "KnOTS",
    "core_space": "Core Space",
}
"""By label; the order gives the looks, so a new method comes last."""


def display_name(label: str) -> str:
    """ "TIES" for `ties`, "TIES (α=0.3)" for `ties (α=0.3)`; other labels are shown as they are."""
    name, parenthesis, rest = label.partition(" (")
    return NAMES.get(name, name) + parenthesis + rest


@dataclass(frozen=True)
class Look:
    """How a figure draws a model, in Vega-Lite's terms."""

    color: str
    dash: tuple[int, ...]
    marker: str

    @staticmethod
    def choose(number: int) -> "Look":
        """Seven colors; then the same with another dash and marker."""
        again, first = divmod(number, len(COLORS))
        return Look(COLORS[first], DASHES[again % len(DASHES)], MARKERS[(first + again) % len(MARKERS)])


REFERENCE = Look("#333333", DASHES[0], _STAR)
"""Of models that no merger made."""
LOOKS = len(COLORS) * len(DASHES)


def choose_looks(labels: Iterable[str]) -> dict[str, Look]:
    """A look for each label. A method of `NAMES` always has the same one.

    Several runs of a method, as `ties (α=0.3)`, have its color, each with another dash and marker. Any other
    label takes a look by its hash, or the next that no other label of the figure has.
    """
    every = list(dict.fromkeys(labels))
    numbers = {label: list(NAMES).index(label) for label in every if label in NAMES}
    looks = {label: Look.choose(number) for label, number in numbers.items()}
    for label in every:
        method = label.partition(" (")[0]
        if label not in looks and method in NAMES:
            looks[label] = _vary(Look.choose(list(NAMES).index(method)), looks.values())
    for label in sorted(set(every) - set(looks)):
        start = zlib.crc32(label.encode())
        order = [(start + step) % LOOKS for step in range(LOOKS)]
        taken = set(looks.values())
        number = next((number for number in order if Look.choose(number) not in taken), order[0])
        looks[label] = Look.choose(number)
    return {label: looks[label] for label in every}


def _vary(look: Look, taken: Collection[Look]) -> Look:
    """The look, or the first of its color that is free."""
    others = (Look(look.color, dash, marker) for dash, marker in zip(cycle(DASHES), MARKERS * 6, strict=False))
    return next((each for each in (look, *others) if each not in taken), look)
