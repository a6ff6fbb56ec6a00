"""The configuration of a run over backbones and tasks. `checking` compares what is composed with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from mergekit_lab.backbones import Linearized, LoRA, Parametrization
from mergekit_lab.errors import InputError, suggestion
from mergekit_lab.optim import gradient_evaluations
from mergekit_lab.optim.offset import OffsetOptimizer
from mergekit_lab.schema.check import Target, TopLevel, build, check_against, check_slice
from mergekit_lab.training import TrainingSettings

_ACTIONS = ("list", "verify", "explain", "prune", "export", "import")
_ESTIMATES = ("per_sample", "first_moment")
OBJECTIVES = ("normalized", "value")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
STRATEGIES = ("auto", "ddp", "fsdp")

__all__ = [
    "Curvature",
    "Main",
    "Search",
    "StorePlace",
    "Suite",
    "build",
    "check",
    "evaluations_a_step",
    "optimizer_factory",
    "wants_fit",
    "with_chosen_merger",
]


@dataclass(frozen=True)
class Curvature:
    """Which curvature of the experts is computed, and from what.

    Args:
        kind: "fisher" (the diagonal) or "gram" (of every linear layer's inputs), for all experts; what mergers
            ask for is computed besides. Null: that alone.
        samples: training images a task, the first of a seeded shuffle; at least 1.
        fraction: the same as a share of the training images, in (0, 1]; in place of `samples`.
        estimate: of a Fisher: "per_sample", the mean of samples' squared gradients; "first_moment", the square
            of what Adam would remember of batches of `training.batch_size` at the expert's weights.
        sampled: draw a Fisher's labels from the model instead of taking the true ones; per sample alone.
        chunk: samples whose activations are held at a time.
    """

    kind: str | None
    samples: int | None
    fraction: float | None
    estimate: str
    sampled: bool
    chunk: int

    def __post_init__(self) -> None:
        if self.kind not in (None, "fisher", "gram"):
            known = suggestion(str(self.kind), ["fisher", "gram"])
            raise InputError(f"curvature.kind is {self.kind!r}{known}")
        if self.estimate not in _ESTIMATES:
            raise InputError(f"curvature.estimate is {self.estimate!r}{suggestion(self.estimate, _ESTIMATES)}")
        if self.sampled and self.estimate != "per_sample":
            raise InputError("curvature.sampled=true draws a label a sample: it needs estimate=per_sample")
        if (self.samples is None) == (self.fraction is None):
            raise InputError(
                f"curvature.samples is {self.samples} and curvature.fraction {self.fraction}: set one and "
                "leave the other null"
            )
        for name in ("samples", "chunk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"curvature.{name} is {value}; it must be at least 1")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise InputError(f"curvature.fraction is {self.fraction}; it must be in (0, 1]")

    def count(self, images: int) -> int:
        """How many of a task's training images are used."""
        wanted = self.samples if self.fraction is None else max(1, round(self.fraction * images))
        assert wanted is not None
        return min(wanted, images)


@dataclass(frozen=True)
class Search:
    """How a coefficient that is null is chosen.

    Args:
        coefficients: the grid that validation decides over; empty takes each method's own default.
        method: "grid" goes through it; "halving" begins with it on a part of the validation samples, keeps the
            better half, and then refines around the best.
        prune: leave a candidate that cannot win any more: the same choice, but gaps in the curve.
        patience: end a grid after so many worse candidates in a row; null goes through all.
        refine: how often halving halves its steps around the best.
        fields: `{field: [values]}` of methods that are searched together with the coefficient, where a method
            has the field; null for none.
    """

    coefficients: list[float]
    method: str = "grid"
    prune: bool = True
    patience: int | None = None
    refine: int = 2
    fields: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) for value in self.coefficients):
            raise InputError(f"search.coefficients are {self.coefficients}; they must be finite")
        if self.method not in ("grid", "halving"):
            raise InputError(f"search.method is {self.method!r}{suggestion(self.method, ['grid', 'halving'])}")
        if self.method == "halving" and len(self.coefficients) == 1:
            raise InputError("search.method=halving needs two or more search.coefficients to begin with")
        if self.patience is not None and self.patience < 1:
            raise InputError(f"search.patience is {self.patience}; it must be at least 1, or null")
        if self.refine < 0:
            raise InputError(f"search.refine is {self.refine}; it must be at least 0")
        for name, values in (self.fields or {}).items():
            if not isinstance(values, list) or not values:
                raise InputError(f"search.fields.{name} is {values!r}; it must be a list of values")

    def content(self) -> dict[str, Any]:
        """What of it decides a choice, for the names of results."""
        found: dict[str, Any] = {"grid": self.coefficients}
        if self.method != "grid":
            found |= {"search": self.method, "refine": self.refine}
        elif self.patience is not None:
            found["patience"] = self.patience
        return found

    def variants(self, method: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every combination of the searched values of fields that a method has; `[{}]` for none."""
        fields = {name: values for name, values in (self.fields or {}).items() if name in method}
        return [dict(zip(fields, values, strict=True)) for values in product(*fields.values())]


@dataclass(frozen=True)
class Place:
    """Where and how training runs: what of `lightning.Trainer` decides nothing of the result.

    Args:
        accelerator: Lightning's name: auto, cpu, gpu, cuda, mps.
        devices: processes that train one expert together, one a device; null takes one for each of the run's
            devices. More than 1 needs a strategy.
        strategy: "auto", one process an expert; "ddp", the batch is spread over processes; "fsdp", the
            weights too (FSDP2).
        deterministic: refuse operations whose result varies from run to run.
    """

    accelerator: str
    devices: int | None
    strategy: str = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(f"trainer.strategy is {self.strategy!r}{suggestion(self.strategy, STRATEGIES)}")
        if self.accelerator not in ACCELERATORS:
            raise InputError(
                f"trainer.accelerator is {self.accelerator!r}{suggestion(self.accelerator, ACCELERATORS)}"
            )
        if self.devices is not None and self.devices < 1:
            raise InputError(f"trainer.devices is {self.devices}; it must be at least 1, or null")
        if self.strategy == "auto" and self.devices != 1:
            raise InputError(
                f"trainer.devices is {self.devices}, and one process trains an expert: choose trainer=ddp or "
                "trainer=fsdp, or leave it 1 (experts are spread over the devices of `device`)"
            )


@dataclass(frozen=True)
class StorePlace:
    """Where artifacts are kept, and what `stage=store` does there.

    Args:
        root: a folder; null takes `$MERGEKIT_LAB_STORE`, else the user's cache.
        action: "list"; "verify" hashes, and take out what differs; "explain" why what the composed run wants
            is not there; "prune"; "export" one artifact as a folder; "import" such a folder.
        kind, key: narrow it to a kind ("experts"), or to keys that begin so.
        older_than: narrow it to what was made more than so many days ago, at least 0.
        which: prune "all", what the composed "run" wants, or all "others" but what is made of data alone, which
            goes where `kind` names it.
        confirm: verify and prune remove; otherwise they say what would go.
        path: of the folder exported or imported.
    """

    root: str | None
    action: str = "list"
    kind: str | None = None
    key: str | None = None
    older_than: float | None = None
    which: str = "others"
    confirm: bool = False
    path: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("action", _ACTIONS), ("which", ("all", "run", "others"))):
            value = getattr(self, name)
            if value not in known:
                raise InputError(f"store.{name} is {value!r}{suggestion(value, known)}")
        if self.older_than is not None and not 0 <= self.older_than < math.inf:
            raise InputError(f"store.older_than is {self.older_than}; it must be at least 0 days, and finite")


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
class Main(TopLevel):
    """The top level of the configuration; the groups' own pages say more."""

    backbone: Target
    suite: Suite
    experts: str | dict[str, str] | None
    finetuning: Target
    optimizer: Target
    training: TrainingSettings
    curvature: Curvature
    search: Search
    analysis: Target
    trainer: Place
    logger: Target
    store: StorePlace


def check(cfg: DictConfig) -> None:
    """Refuse every key that nothing reads, before any work.

    Raises:
        InputError: an unknown key (with its file and the nearest known one), an interpolation that does not
            resolve, or a value of the wrong kind or range.
    """
    check_against(cfg, Main)
    check_slice(cfg)
    if cfg.evaluation_batch_size < 1:
        raise InputError(f"evaluation_batch_size is {cfg.evaluation_batch_size}; it must be at least 1")
    if not -(2**63) <= cfg.seed < 2**63:
        raise InputError(f"seed is {cfg.seed}; it must be a whole number of 64 bits")
    if not 0 <= cfg.images_limit_gb < math.inf:
        raise InputError(f"images_limit_gb is {cfg.images_limit_gb}; it must be at least 0, and finite")
    if cfg.runs == []:
        raise InputError("runs is an empty list: name the folders of runs or sweeps, or leave it null")
    if cfg.objective not in (None, *OBJECTIVES):
        raise InputError(f"objective is {cfg.objective!r}{suggestion(cfg.objective, OBJECTIVES)}")
    if cfg.objective and not (cfg.mergers or cfg.merger):
        raise InputError(f"objective={cfg.objective} is that of merged models: set merger=NAME")
    if "analyze" in ([cfg.stage] if cfg.stage else cfg.stages):
        build(cfg.analysis)
    finetuning = build(cfg.finetuning)
    if not isinstance(finetuning, Parametrization):
        raise InputError(f"finetuning is a {type(finetuning).__name__}, not a parametrization")
    if wants_fit(cfg.optimizer) and isinstance(finetuning, LoRA):
        raise InputError(
            "optimizer.scale=fit fits the task vectors of weights, and finetuning=lora trains factors of them: "
            "give the scale as a number"
        )
    if isinstance(finetuning, Linearized) and cfg.backbone.get("checkpointing"):
        raise InputError(
            "backbone.checkpointing=true computes activations again in a backward pass, which forward-mode "
            "derivatives do not allow: set it to false with finetuning=linearized"
        )
    for task, node in cfg.optimizer_of.items():
        if wants_fit(node):
            raise InputError(
                f"optimizer_of.{task}.scale is 'fit', which one optimizer of all tasks can have: give it as a "
                "number"
            )
        evaluations_a_step(node)
    TrainingSettings(**cfg.training).plan(evaluations_a_step(cfg.optimizer))
    optimizers = [cfg.optimizer, *cfg.optimizer_of.values()]
    if cfg.training.precision == "bf16-true":
        _refuse_vanishing_offsets(optimizers)
    for node in optimizers:
        if cfg.training.get("budget") == "seconds" and "steps" in node:
            raise InputError(
                f"{node._target_.rpartition('.')[2]} plans over its number of steps, which "
                "training.budget=seconds leaves open: take a budget of steps or gradient_evaluations"
            )
    if cfg.trainer.strategy == "fsdp":
        _refuse_what_needs_whole_weights(finetuning, optimizers)


def with_chosen_merger(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration in which `merger=NAME` means the experiment's own `mergers.NAME`, if it has one.

    Its settings are kept; what the command line says of `merger.KEY` wins over them.

    Args:
        cfg: the composed configuration.
        overrides: as on the command line, a sweep's among them.
    """
    said = [override.lstrip("+").partition("=")[::2] for override in overrides]
    name = next((value for key, value in reversed(said) if key == "merger"), None)
    own = cfg.mergers.get(name) if name else None
    if own is None or own._target_ != cfg.merger._target_:
        return cfg
    chosen = OmegaConf.create(OmegaConf.to_container(own))
    for key, _ in said:
        if key.startswith("merger."):
            OmegaConf.update(chosen, key.removeprefix("merger."), OmegaConf.select(cfg, key))
    made = deepcopy(cfg)
    OmegaConf.update(made, "merger", chosen, merge=False)
    return made


def _refuse_vanishing_offsets(nodes: Iterable[DictConfig]) -> None:
    for made in map(_built_alone, nodes):
        if isinstance(made, OffsetOptimizer):
            raise InputError(
                f"{type(made).__name__}'s offsets would vanish in the rounding of bfloat16 weights (half a "
                "unit in the last place of .25 is 5e-4): set training.precision=bf16-mixed, which trains "
                "float32 weights with bfloat16 arithmetic and stores them as the backbone is stored"
            )


def _refuse_what_needs_whole_weights(finetuning: Parametrization, nodes: Iterable[DictConfig]) -> None:
    using = [finetuning, *map(_built_alone, nodes)]
    if odd := [type(one).__name__ for one in using if not getattr(one, "takes_sharded", True)]:
        raise InputError(
            f"trainer=fsdp leaves each process a part of every weight, and {odd[0]} needs them whole: take "
            "trainer=ddp"
        )


def _built_alone(node: DictConfig) -> torch.optim.Optimizer:
    """The optimizer of a configuration, on a parameter of its own."""
    made: torch.optim.Optimizer = optimizer_factory(node, 1, _ANY_FIT if wants_fit(node) else None)(
        [("weight", torch.nn.Parameter(torch.zeros(1)))]
    )
    return made


def evaluations_a_step(node: DictConfig) -> Fraction:
    """What a step of an optimizer's configuration costs, in gradients of a whole batch.

    It is built for that, so that its complaints come before any training.
    """
    try:
        return gradient_evaluations(_built_alone(node))
    except (ValueError, TypeError) as error:
        raise InputError(f"the optimizer cannot be built: {error}") from None


def wants_fit(node: DictConfig) -> bool:
    """Whether an optimizer's configuration leaves the size of its offsets to be fitted."""
    return bool(node.get("scale") == "fit")


def optimizer_factory(node: DictConfig, steps: int, fit: Mapping[str, float] | None = None) -> Any:
    """The optimizer group as a callable of named parameters; `_partial_` is set by its file.

    Args:
        node: the optimizer's configuration.
        steps: of this training, for optimizers that plan over them (the joint model takes more than an expert).
        fit: `loc` and `scale` in place of `scale: fit`.
    """
    made = build(node)
    if not isinstance(made, partial):
        raise InputError("the optimizer's configuration must say `_partial_: true`")
    if wants_fit(node):
        if node.get("task_vectors") is not None or node.get("loc"):
            raise InputError(
                "optimizer.scale=fit finds loc and the task vectors itself: set loc=0, task_vectors=null"
            )
        if fit is None:
            raise InputError("optimizer.scale=fit is not fitted yet")
        made = partial(made, loc=fit["loc"], scale=fit["scale"])
    return partial(made, steps=steps) if "steps" in made.keywords else made


_ANY_FIT = {"loc": 0.0, "scale": 1.0}
