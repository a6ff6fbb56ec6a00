"""What the study runs: worlds, arms, axes, and the cells they make, the most important first."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

SEEDS = (0, 1, 2)
FRESH_SEEDS = (3, 4, 5)
"""Run after the tables were written, to see which of their claims repeat."""
FIXED = 0.4
"""SAFT's fixed coefficient (its Table C4)."""
GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4, 2.8)
PATIENCE = 3
"""A search ends after so many worse candidates in a row."""
ON_AXES = ("average", "task_arithmetic", "ties", "tsvm", "epimer")
MERGERS = (*ON_AXES, "dare", "wudi", "iso_c")
AT_FIXED = ("task_arithmetic", "ties", "tsvm")


@dataclass(frozen=True)
class World:
    """A base and its tasks.

    Attributes:
        lines: overrides that make it.
        sgd: SGD's learning rate.
        hessians: tasks whose experts' Hessians are measured, the first of them.
        samples: training samples of each.
        at_once: of these; fused attention has one derivative, so that each takes much memory.
    """

    lines: tuple[str, ...]
    sgd: float
    hessians: int
    samples: int
    at_once: int


_GLYPHS = ("digits", "mnist", "latin", "greek", "cyrillic", "math", "accents", "style")
WORLDS = {
    "glyphs": World(("suite=glyphs8", "evaluation_batch_size=2048"), 1e-2, 8, 256, 256),
    "minilm": World(("+experiment=minilm_text12", "evaluation_batch_size=1024"), 1e-2, 2, 64, 32),
}
SMALL = ("training.steps=4", "training.validations=1", "curvature.samples=32")
"""Of a dry run on a CPU, which takes the first tasks alone, and as many samples of a part."""
SMALL_TASKS = 3
SMALL_SIZES = {"train": 64, "validation": 32, "test": 48}

CORE: dict[str, tuple[str, ...]] = {
    "adamw": ("optimizer=adamw",),
    "sam": ("optimizer=sam",),
    "asam": ("optimizer=asam",),
    "mergopt": ("optimizer=mergopt",),
    "mergopt fitted": ("optimizer=mergopt", "optimizer.scale=fit"),
}
"""SAM at ρ .05, ASAM as SAFT has it, MergOPT at its paper's b and at the size of AdamW's task vectors."""
_SAME_COST = "training.budget=gradient_evaluations"
_LINEARIZED = ("finetuning=linearized", "curvature.samples=32")
"""A Fisher takes a backward pass a sample there."""
OTHERS: dict[str, tuple[str, ...]] = {
    "sam, same cost": ("optimizer=sam", _SAME_COST),
    "asam, same cost": ("optimizer=asam", _SAME_COST),
    "mergopt 5 x fitted": ("optimizer=mergopt", "optimizer.scale=fit"),
    "mergopt 25 x fitted": ("optimizer=mergopt", "optimizer.scale=fit"),
    "adamw, linearized": ("optimizer=adamw", *_LINEARIZED),
    "asam, linearized": ("optimizer=asam", *_LINEARIZED),
    "adamw, attention_linear": ("optimizer=adamw", "finetuning=attention_linear"),
    "asam, attention_linear": ("optimizer=asam", "finetuning=attention_linear"),
    "sgd": ("optimizer=sgd", "training.weight_decay=1e-4"),
    "asam samsung": ("optimizer=asam", "optimizer.scaling=samsung"),
    "asam printed": ("optimizer=asam", "optimizer.scaling=printed"),
}
TIMES_FIT = {"mergopt 5 x fitted": 5, "mergopt 25 x fitted": 25}
"""Offsets so many times the size that fits AdamW's task vectors, which is what the method takes them for."""
ARMS = CORE | OTHERS

RHOS = {"sam": 0.05, "asam": 0.5}
TIMES_RHO = (0.1, 0.2, 0.5, 2.0, 4.0, 10.0)
"""Along ρ: these times the published one."""
MORE_RHO = {"minilm": (4.0, 16.0), "glyphs": (0.25,)}
"""At the published ρ, ρ over the base's norm is four times as large on glyphs as in minilm. So 4 there matches
1 on glyphs, 16 matches 4, and 0.25 on glyphs matches 1 there."""
DISTANCES = ((5e-5, 100), (5e-5, 300), (2e-4, 100), (8e-4, 300), (2e-4, 1200), (8e-4, 1200))
"""Learning rate and steps; the main arms stand between them, at 2e-4 × 300."""
STRENGTHS = (500, 2000, 6000)
"""Steps of pretraining; the main arms start from the shipped model's 20,000."""
BATCHES = (16, 256)
SAME_COST = ("sam, same cost", "asam, same cost")
PRETRAININGS = {
    "stopped 2000": "second/step_2000",
    "annealed 2000": "annealed/2000",
    "stopped 6000": "second/step_6000",
    "annealed 6000": "annealed/6000",
    "20000": "second/20000",
}
"""Of another seed: bases that stopped early, while the learning rate was high, and such that end early."""
SAME_COST_AT = {
    "pretraining": tuple(PRETRAININGS)[:4],
    "batch": ("256", "16"),
    "likeness": ("one alphabet",),
    "distance": tuple(f"{lr:g} x {n}" for lr, n in DISTANCES),
}
"""Where SAM and ASAM are trained at equal cost, too; along tasks and ρ they are at all values."""
HALF_STEPS = "256 x 150"
"""Batch and steps of AdamW alone: as few steps as SAM and ASAM have at equal cost."""
FRESH_AT = {"distance": ("0.0002 x 1200",), "batch": ("256", "16")}
"""Beside the main cells, where fresh seeds train AdamW, SAM and ASAM, the latter two at equal cost, too."""
MEASURED = {"axes": ("batch", "distance"), "arms": ("adamw", *RHOS)}
"""Cells whose curvature, linearity and disentanglement are measured apart."""
COUNTS = (2, 4, 6)
"""Tasks that are merged, of the main cells' experts: nested, in an order drawn by the seed; they have 8."""
GROUPS = {
    "alike": ("digits", "mnist", "math", "accents"),
    "unlike": ("digits", "latin", "greek", "style"),
    "four alphabets": ("latin", "greek", "cyrillic", "math"),
}
"""Four experts of the main cells. Of all such groups, task vectors of AdamW (seed 0, 150 steps at 4e-4) have
the largest mean cosine in the first, .059, and the smallest in the second, .009."""
LOOKS = ("shop window", "blueprint", "poster", "chalkboard")
"""Of the four alphabets; the value "one alphabet" has Latin in each."""

ALONG: dict[str, tuple[str | None, ...]] = {
    "distance": ("5e-05 x 100", "5e-05 x 300", "0.0002 x 100", None, "0.0002 x 1200", "0.0008 x 300",
                 "0.0008 x 1200"),
    "base": (*map(str, STRENGTHS), None),
    "pretraining": tuple(PRETRAININGS),
    "tasks": (*map(str, COUNTS), None),
    "likeness": ("unlike", "four alphabets", "alike", "one alphabet"),
    "rho": ("0.1", "0.2", "0.25", "0.5", None, "2", "4", "10"),
    "batch": ("16", None, HALF_STEPS, "256"),
}  # fmt: skip
"""The values of each axis in order; None is the main cell."""

EPIMERS: dict[str, dict[str, object]] = {
    "epimer normalize none": {"normalize": "none"},
    "epimer rank 2": {"rank": 2},
    "epimer rank 4": {"rank": 4},
    "epimer rank 8": {"rank": 8},
    "epimer floor 1e-4": {"floor": 1e-4},
    "epimer floor 1e-2": {"floor": 1e-2},
    "epimer floor 1": {"floor": 1.0},
}
"""What differs from conf/merger/epimer.yaml; with `normalize: trace` a floor is in units of mean curvature."""
SAMPLES = (16, 64)
"""Of an expert's Fisher; 256 elsewhere."""


@dataclass(frozen=True)
class StudyCell:
    """Experts of one arm and seed, merged in many ways.

    Attributes:
        axis, value: what differs from the main cells; "main" and "" there.
        lines: overrides that make the difference and the arm.
        times_fit: the offsets' size in units of the fitted one, where it is not that.
        only_measures: whether the experts are measured and not merged, in a line beside the cell's own.
    """

    world: str
    axis: str
    value: str
    arm: str
    seed: int
    lines: tuple[str, ...]
    times_fit: float | None = None
    only_measures: bool = False

    @property
    def name(self) -> str:
        name = f"{self.world}/{self.axis}/{self.value}/{self.arm}/{self.seed}"
        return f"{name}/measures" if self.only_measures else name

    @property
    def awaits(self) -> str:
        """The cell whose experts this one's offsets are fitted to; it had better not be under way."""
        same = "optimizer.scale=fit" in self.lines
        return f"{self.world}/{self.axis}/{self.value}/adamw/{self.seed}" if same else ""

    @property
    def is_main(self) -> bool:
        return self.axis == "main"

    @property
    def is_fresh(self) -> bool:
        return self.seed in FRESH_SEEDS

    @property
    def mergers(self) -> tuple[str, ...]:
        return MERGERS if self.is_main else ON_AXES

    @property
    def is_measured(self) -> bool:
        """Whether curvature, linearity and disentanglement are."""
        if self.is_fresh:
            return False
        if self.axis == "rho":
            return self.arm in RHOS
        return self.only_measures or self.axis in ("main", "pretraining")

    @property
    def has_subsets(self) -> bool:
        """Whether subsets of its experts are merged."""
        main = self.is_main and not self.is_fresh and self.world == "glyphs" and self.arm in CORE
        return main or self.only_subsets

    @property
    def only_subsets(self) -> bool:
        """Whether its experts are those of a main cell, trained again; its name is that of its first line."""
        return self.axis == "tasks"


def list_cells(bases: Path | None, worlds: Sequence[str] = tuple(WORLDS)) -> list[StudyCell]:
    """All cells, the most important first; without `bases`, those of weaker bases are left out.

    Args:
        bases: the folder of what pretrain.py keeps: `step_N.safetensors`, and those of `PRETRAININGS`.
    """
    order = [
        *_list_main("glyphs", CORE),
        *_list_main("minilm", CORE),
        *_list_main("glyphs", OTHERS),
        *_list_axes(bases, SEEDS[:2]),
        *_list_main("minilm", OTHERS),
        *_list_axes(bases, SEEDS[2:]),
        *_list_further(bases),
        *_list_main("glyphs", ARMS, FRESH_SEEDS),
        *_list_fresh(),
        *_list_main("minilm", ARMS, FRESH_SEEDS),
    ]
    return [cell for cell in order if cell.world in worlds]


def _list_main(
    world: str, arms: dict[str, tuple[str, ...]], seeds: Sequence[int] = SEEDS
) -> Iterator[StudyCell]:
    for seed, (arm, lines) in product(seeds, arms.items()):
        rate = (f"training.lr={WORLDS[world].sgd:g}",) if arm == "sgd" else ()
        yield StudyCell(world, "main", "", arm, seed, (*lines, *rate), TIMES_FIT.get(arm))


def _list_axes(bases: Path | None, seeds: Sequence[int]) -> Iterator[StudyCell]:
    for seed in seeds:
        for axis, values in _list_changes(bases).items():
            for (value, changes), (arm, lines) in product(values.items(), CORE.items()):
                yield StudyCell("glyphs", axis, value, arm, seed, (*lines, *changes))
            if axis == "distance":
                yield from _list_rhos("glyphs", TIMES_RHO, seed, RHOS)


def _list_changes(bases: Path | None) -> dict[str, dict[str, tuple[str, ...]]]:
    """Overrides by axis and value."""
    distances = {f"{lr:g} x {n}": (f"training.lr={lr:g}", f"training.steps={n}") for lr, n in DISTANCES}
    axes: dict[str, dict[str, tuple[str, ...]]] = {"distance": distances}
    if bases is not None:
        axes["base"] = {str(n): _start_from(bases, f"step_{n}") for n in STRENGTHS}
    axes["batch"] = {str(n): (f"training.batch_size={n}",) for n in BATCHES}
    axes["likeness"] = {"one alphabet": _choose_one_alphabet()}
    return axes


def _start_from(bases: Path, name: str) -> tuple[str, ...]:
    return (f"base={bases.resolve()}/{name}.safetensors",)


def _list_rhos(world: str, multiples: Sequence[float], seed: int, arms: Iterable[str]) -> Iterator[StudyCell]:
    for arm, times in product(arms, multiples):
        rho = times * RHOS[arm.partition(",")[0]]
        yield StudyCell(world, "rho", f"{times:g}", arm, seed, (*ARMS[arm], f"optimizer.rho={rho:g}"))


def _list_further(bases: Path | None) -> Iterator[StudyCell]:
    """Another pretraining, ρ relative to the base's norm, equal cost along axes, and what is measured apart."""
    axes, again = _list_changes(bases), {}
    if bases is not None:
        again = {value: _start_from(bases, name) for value, name in PRETRAININGS.items()}
    for seed, (value, changes), arm in product(SEEDS, again.items(), MEASURED["arms"]):
        yield StudyCell("glyphs", "pretraining", value, arm, seed, (*CORE[arm], *changes))
    axes["pretraining"] = again
    for seed, (world, multiples) in product(SEEDS, MORE_RHO.items()):
        yield from _list_rhos(world, multiples, seed, RHOS)
    for seed, (axis, values), arm in product(SEEDS, SAME_COST_AT.items(), SAME_COST):
        for value in (v for v in values if v in axes.get(axis, {})):
            yield StudyCell("glyphs", axis, value, arm, seed, (*OTHERS[arm], *axes[axis][value]))
    for seed, arm in product(SEEDS, SAME_COST):
        yield StudyCell("glyphs", "tasks", str(COUNTS[0]), arm, seed, OTHERS[arm])
    for seed in SEEDS:
        yield from _list_rhos("glyphs", sorted({*TIMES_RHO, *MORE_RHO["glyphs"]}), seed, SAME_COST)
    for seed in SEEDS:
        lines = (*CORE["adamw"], "training.batch_size=256", "training.steps=150")
        yield StudyCell("glyphs", "batch", HALF_STEPS, "adamw", seed, lines)
    for seed, axis, arm in product(SEEDS, MEASURED["axes"], MEASURED["arms"]):
        for value, changes in axes.get(axis, {}).items():
            lines = (*CORE[arm], *changes)
            yield StudyCell("glyphs", axis, value, arm, seed, lines, only_measures=True)


def _list_fresh() -> Iterator[StudyCell]:
    axes = _list_changes(None)
    for seed, (axis, values), arm in product(FRESH_SEEDS, FRESH_AT.items(), (*MEASURED["arms"], *SAME_COST)):
        for value in values:
            yield StudyCell("glyphs", axis, value, arm, seed, (*ARMS[arm], *axes[axis][value]))


def _choose_one_alphabet() -> tuple[str, ...]:
    names = {look: f"latin_{look.replace(' ', '_')}" for look in LOOKS}
    added = [f"+task@suite.tasks.{name}=latin" for name in names.values()]
    added += [f"suite.tasks.{name}.look={look}" for look, name in names.items()]
    added += [f"suite.tasks.{name}.name={name}" for name in names.values()]
    return (*(f"~suite.tasks.{task}" for task in _GLYPHS), *added)
