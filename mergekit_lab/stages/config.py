"""The configuration of a run over backbones and tasks. `checking` compares what is composed with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig

from mergekit_lab.errors import InputError, suggestion
from mergekit_lab.stages.checking import Target, build, check_against
from mergekit_lab.training import Settings

__all__ = [
    "Curvature",
    "Finetuning",
    "Main",
    "Search",
    "StorePlace",
    "Suite",
    "build",
    "check",
    "optimizer_factory",
]


@dataclass(frozen=True)
class Finetuning:
    """What of the backbone trains.

    Args:
        parametrisation: "full": every parameter of the image encoder.
    """

    parametrisation: str

    def __post_init__(self) -> None:
        if self.parametrisation != "full":
            known = suggestion(self.parametrisation, ["full"])
            raise InputError(f"finetuning.parametrisation is {self.parametrisation!r}{known}")


@dataclass(frozen=True)
class Curvature:
    """How the diagonal Fisher of an expert is estimated.

    Args:
        samples: training images a task, the first of a seeded shuffle; at least 1.
        sampled: draw labels from the model instead of taking the true ones.
        chunk: samples whose gradients are held at a time.
    """

    samples: int
    sampled: bool
    chunk: int

    def __post_init__(self) -> None:
        for name in ("samples", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"curvature.{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class Search:
    """How a coefficient that is null is chosen.

    Args:
        coefficients: the grid that validation decides over; empty takes each method's own default.
    """

    coefficients: list[float]


@dataclass(frozen=True)
class StorePlace:
    """Where artefacts are kept.

    Args:
        root: a folder; null takes `$MERGEKIT_LAB_STORE`, else the user's cache.
    """

    root: str | None


@dataclass(frozen=True)
class Suite:
    """The tasks of a run.

    Args:
        name: what records call it.
        tasks: by name, in the order of the table's columns.
    """

    name: str
    tasks: dict[str, Target]


@dataclass(frozen=True)
class Main:
    """The top level of the configuration; the groups' own pages say more."""

    backbone: Target
    suite: Suite
    finetuning: Finetuning
    optimizer: Target
    training: Settings
    merger: Target | None
    mergers: dict[str, Target]
    curvature: Curvature
    search: Search
    joint: bool
    trainer: dict[str, Any]
    logger: Target
    store: StorePlace
    stages: list[str]
    stage: str | None
    seed: int
    device: str
    evaluation_batch_size: int
    progress: bool
    run_dir: str


def check(cfg: DictConfig) -> None:
    """Refuse every key that nothing reads, before any work.

    Raises:
        InputError: an unknown key (with its file and the nearest known one), an interpolation that does not
            resolve, or a value of the wrong kind or range.
    """
    check_against(cfg, Main)


def optimizer_factory(cfg: DictConfig, steps: int) -> Any:
    """The optimizer group as a callable of named parameters; `_partial_` is set by its file.

    Args:
        cfg: the composed configuration.
        steps: of this training, for optimizers that plan over them (the joint model takes more than an expert).
    """
    made = build(cfg.optimizer)
    if not isinstance(made, partial):
        raise InputError("the optimizer's configuration must say `_partial_: true`")
    return partial(made, steps=steps) if "steps" in made.keywords else made
