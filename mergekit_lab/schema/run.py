"""The configuration of a run over backbones and tasks. `check` compares composed configurations with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt, MinLen
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer

from mergekit_lab.backbones import Backbone, Linearized, LoRA, Parametrization
from mergekit_lab.errors import InputError, say_error
from mergekit_lab.evaluation.search import import_optuna
from mergekit_lab.merging import Method
from mergekit_lab.optim import count_gradient_evaluations
from mergekit_lab.optim.offset import OffsetOptimizer
from mergekit_lab.ranges import FASTEST, Count, Share, require
from mergekit_lab.reporting import Tracker
from mergekit_lab.reporting.paper_tables import read_published
from mergekit_lab.schema.check import build, build_partial, check_against
from mergekit_lab.schema.stages import list_stages
from mergekit_lab.schema.store import StoreSettings
from mergekit_lab.schema.target import Target
from mergekit_lab.tasks import Task
from mergekit_lab.training import TrainingSettings


@dataclass(frozen=True)
class Curvature:
    """Which curvature of the experts is computed, and from what.

    Args:
        kind: "fisher" (the diagonal) or "gram" (of every linear layer's inputs), for all experts. Null computes
            only what mergers need, which is computed in any case.
        samples: training images per task, the first of a seeded shuffle.
        fraction: the same as a share of the training images, in place of `samples`.
        batch: with `fraction`, only whole batches of this many images count, at least one.
        estimate: of a Fisher. "per_sample" is the mean of samples' squared gradients. "first_moment" is the
            square of Adam's first moment over batches of `training.batch_size` at the expert's weights.
        sampled: draw a Fisher's labels from the model instead of taking the true ones; only "per_sample".
        chunk: the number of samples whose activations are in memory at a time.
    """

    kind: Literal["fisher", "gram"] | None
    samples: Count | None
    fraction: Share | None
    batch: Count | None
    estimate: Literal["per_sample", "first_moment"]
    sampled: bool
    chunk: Count

    def __post_init__(self) -> None:
        if self.sampled and self.estimate != "per_sample":
            raise InputError(
                "curvature.sampled=true draws a label per sample: set curvature.estimate=per_sample"
            )
        if (self.samples is None) == (self.fraction is None):
            raise InputError(
                f"curvature.samples is {self.samples} and curvature.fraction {self.fraction}: set one and "
                "leave the other null"
            )
        if self.batch is not None and self.fraction is None:
            raise InputError(f"curvature.batch={self.batch} needs curvature.fraction: set that too")

    def count(self, images: int) -> int:
        """How many of a task's training images are used."""
        if self.fraction is None:
            assert self.samples is not None
            wanted = self.samples
        elif self.batch is None:
            wanted = max(1, round(self.fraction * images))
        else:
            wanted = self.batch * max(1, int(self.fraction * images / self.batch + 1e-9))
        return min(wanted, images)


@dataclass(frozen=True)
class Search:
    """How a null coefficient is chosen, or, with cma_es, weights in its place.

    Args:
        coefficients: the grid from which validation chooses. Empty takes each method's own default. cma_es does
            not need it.
        method: "grid" tries all of it. "halving" tries all on a part of the validation samples, keeps the
            better half, and then refines around the best. "cma_es" finds a weight for each expert and pattern
            of layers, at coefficient 1.
        prune: stop evaluating a candidate that can no longer win. The choice is the same, but curves have gaps.
        patience: end a grid after this many worse candidates in a row; null tries all.
        refine: how often halving halves its steps around the best.
        fields: `{field: [values]}`, searched together with the coefficient for methods that have the field;
            null for none.
        layers: for cma_es, like all that follow: patterns of tensor names (`"*.attn.*"`). The first that
            matches counts. Tensors without a match share a further weight. Empty means one weight per expert.
        low, high: the range of every weight. The search begins in its middle.
        trials: the number of candidates.
        population: candidates per generation; null takes `4 + 3 ln(weights)`.
        seed: of the draws.
    """

    coefficients: list[float] | None = None
    method: Literal["grid", "halving", "cma_es"] = "grid"
    prune: bool = True
    patience: Count | None = None
    refine: Annotated[int, Ge(0)] = 2
    fields: dict[str, Annotated[list[Any], MinLen(1)]] | None = None
    layers: list[str] | None = None
    low: float = 0.0
    high: float = 1.0
    trials: Count = 100
    population: Annotated[int, Ge(3)] | None = None
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0

    def __post_init__(self) -> None:
        others = _OF_GRIDS if self.method == "cma_es" else _OF_CMA_ES
        for each in fields(self):
            if each.name in others and getattr(self, each.name) != each.default:
                raise InputError(f"search.method={self.method} does not use search.{each.name}: leave it out")
        if self.method == "cma_es":
            import_optuna()
            require(self.low < self.high, "search.low", self.low, f"below search.high, {self.high}")
        elif self.coefficients is None:
            raise InputError(f"search.method={self.method} needs search.coefficients; [] searches none")
        elif self.method == "halving" and len(self.coefficients) == 1:
            raise InputError("search.method=halving needs at least two search.coefficients")

    @property
    def takes_place(self) -> bool:
        """Whether anything is searched."""
        return self.method == "cma_es" or bool(self.coefficients)

    def describe_content(self) -> dict[str, Any]:
        """The settings that decide a choice, for the keys of results."""
        if self.method == "cma_es":
            return {"search": self.method, **{name: getattr(self, name) for name in _OF_CMA_ES}}
        content: dict[str, Any] = {"grid": self.coefficients}
        if self.method != "grid":
            content |= {"search": self.method, "refine": self.refine}
        elif self.patience is not None:
            content["patience"] = self.patience
        return content

    def list_variants(self, method: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every combination of the searched values of fields that a method has; `[{}]` for none."""
        searched = {name: values for name, values in (self.fields or {}).items() if name in method}
        return [dict(zip(searched, values, strict=True)) for values in product(*searched.values())]


_OF_GRIDS = ("coefficients", "prune", "patience", "refine", "fields")
_OF_CMA_ES = ("layers", "low", "high", "trials", "population", "seed")


@dataclass(frozen=True)
class TrainerSettings:
    """Where and how training runs: settings of `lightning.Trainer` that do not decide the result.

    Args:
        accelerator: Lightning's name.
        processes: the number that train one expert together, one per device; null takes one for each of the
            run's devices. More than 1 needs a strategy.
        strategy: "auto" trains an expert in one process, "ddp" spreads the batch over processes, and "fsdp" the
            weights too (FSDP2).
        deterministic: refuse operations whose result varies from run to run.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"]
    processes: Count | None
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.strategy == "auto" and self.processes != 1:
            raise InputError(
                f"trainer.processes is {self.processes}, but one process trains an expert: choose trainer=ddp "
                "or trainer=fsdp, or leave it 1 (experts are spread over the devices of `device`)"
            )


@dataclass(frozen=True)
class Suite:
    """The tasks of a run.

    Args:
        name: what records call it.
        tasks: by name, in the order of the table's columns.
    """

    name: str
    tasks: dict[str, Target[Task]]


@dataclass(frozen=True)
class Main:
    """The top level of a run's configuration, `main.yaml`; the groups' own pages say more.

    `runs.settle` has written out `base`, `texts`, `suite.lm_eval_tasks` and lists of `experts` and `models`.
    """

    stage: str | list[str]
    backbone: Target[Backbone]
    suite: Suite
    data_root: str | None
    sources: dict[str, str | None]
    images_limit_gb: Annotated[float, Ge(0)]
    fetch_to: str
    base: str | None
    experts: str | dict[str, str] | None
    texts: None
    models: dict[str, str] | None
    published: list[str]
    shipped: str | None
    finetuning: Target[Parametrization]
    optimizer: Target[Optimizer]
    optimizer_of: dict[str, Target[Optimizer]]
    training: TrainingSettings
    joint: bool
    curvature: Curvature
    search: Search
    merger: Target[Method] | None
    mergers: dict[str, Target[Method]]
    analysis: Target[Literal["mergekit_lab.runs.analyses.Analysis"]]
    evaluation_batch_size: Count
    evaluation_compile: bool
    trainer: TrainerSettings
    store: StoreSettings
    logger: Target[Tracker]
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)]
    device: str | int | list[str | int]
    only: list[str] | None
    dry_run: bool
    progress: bool
    run_dir: str
    runs: str | int | Annotated[list[str | int], MinLen(1)] | None
    table: str | None
    metric: str
    objective: Literal["normalized", "value"] | None


def check(cfg: DictConfig) -> DictConfig:
    """Refuse every key that nothing reads, before any work; returns the configuration as `check_against` does.

    Raises:
        InputError: an unknown key (with its file and the nearest known one), an interpolation that does not
            resolve, or a value of the wrong kind or range.
    """
    cfg = check_against(cfg, Main)
    if cfg.objective and not (cfg.mergers or cfg.merger):
        raise InputError(
            f"objective={cfg.objective} scores merged models, and this run has none: set merger=NAME"
        )
    for table in cfg.published:
        read_published(table)
    if "analyze" in list_stages(cfg):
        build(cfg.analysis, get_class("mergekit_lab.runs.analyses.Analysis"))
    finetuning = build(cfg.finetuning, Parametrization)
    if wants_fit(cfg.optimizer) and isinstance(finetuning, LoRA):
        raise InputError(
            "optimizer.scale=fit needs task vectors of whole weights, but finetuning=lora trains factors: "
            "set the scale to a number"
        )
    if isinstance(finetuning, Linearized) and cfg.backbone.get("checkpointing"):
        raise InputError("finetuning=linearized cannot recompute activations: set backbone.checkpointing=false")
    for task, node in cfg.optimizer_of.items():
        if wants_fit(node):
            raise InputError(
                f"optimizer_of.{task}.scale is 'fit', which works only with one optimizer for all tasks: "
                "give it as a number"
            )
        count_evaluations_a_step(node)
    TrainingSettings(**cfg.training).plan(count_evaluations_a_step(cfg.optimizer))
    optimizers = [cfg.optimizer, *cfg.optimizer_of.values()]
    for optimizer in map(_build_alone, optimizers) if cfg.training.precision == "bf16-true" else ():
        if isinstance(optimizer, OffsetOptimizer):
            raise InputError(
                f"bfloat16 weights would round away {type(optimizer).__name__}'s small offsets: set "
                "training.precision=bf16-mixed (float32 weights, bfloat16 arithmetic)"
            )
    for node in optimizers:
        if cfg.training.get("budget") == "seconds" and "steps" in node:
            raise InputError(
                f"{node._target_.rpartition('.')[2]} must know the number of steps, but "
                "training.budget=seconds leaves it open: set training.budget to steps or gradient_evaluations"
            )
    if cfg.trainer.strategy == "fsdp":
        using = [finetuning, *map(_build_alone, optimizers)]
        if odd := [type(one).__name__ for one in using if not getattr(one, "takes_sharded", True)]:
            raise InputError(
                f"trainer=fsdp leaves each process a part of every weight, and {odd[0]} needs them whole: take "
                "trainer=ddp"
            )
    return cfg


def with_chosen_merger(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration in which `merger=NAME` means the experiment's own `mergers.NAME`, if it has one.

    The experiment's settings are kept, unless the command line sets `merger.KEY`, or a group there
    (`merger@merger.inner=ties`).

    Args:
        cfg: the composed configuration.
        overrides: as on the command line, a sweep's among them.
    """
    pairs = [override.lstrip("+").partition("=")[::2] for override in overrides]
    name = next((value for key, value in reversed(pairs) if key == "merger"), None)
    own = cfg.mergers.get(name) if name else None
    if own is None or own._target_ != cfg.merger._target_:
        return cfg
    chosen = OmegaConf.create(OmegaConf.to_container(own))
    for key, _ in pairs:
        key = key.rpartition("@")[2]
        if key.startswith("merger."):
            OmegaConf.update(chosen, key.removeprefix("merger."), OmegaConf.select(cfg, key), merge=False)
    changed = deepcopy(cfg)
    OmegaConf.update(changed, "merger", chosen, merge=False)
    return changed


def _build_alone(node: DictConfig) -> Optimizer:
    """The optimizer of a configuration, made for a parameter of no model.

    Raises:
        ValueError: a setting of torch's own is so large that a step would overflow; ours say so themselves.
    """
    optimizer: Optimizer = make_optimizer_factory(node, 1, _ANY_FIT if wants_fit(node) else None)(
        [("weight", torch.nn.Parameter(torch.zeros(1)))]
    )
    for name, value in optimizer.param_groups[0].items():
        if isinstance(value, int | float) and not abs(value) <= FASTEST:
            raise ValueError(f"{name} is {value:g}; it must be at most {FASTEST:g}")
    return optimizer


def count_evaluations_a_step(node: DictConfig) -> Fraction:
    """The cost of an optimizer's step in gradients of a whole batch.

    The optimizer is built for this, so its errors come before any training.
    """
    try:
        return count_gradient_evaluations(_build_alone(node))
    except (ValueError, TypeError) as error:
        raise InputError(f"the optimizer cannot be built: {say_error(error)}") from None


def wants_fit(node: DictConfig) -> bool:
    """Whether an optimizer's configuration leaves the size of its offsets to be fitted."""
    return bool(node.get("scale") == "fit")


def make_optimizer_factory(node: DictConfig, steps: int, fit: Mapping[str, float] | None = None) -> Any:
    """The optimizer group as a callable of named parameters; `_partial_` is set by its file.

    Args:
        node: the optimizer's configuration.
        steps: of this training, for optimizers that plan over them (the joint model takes more than an expert).
        fit: `loc` and `scale` in place of `scale: fit`.
    """
    factory = build_partial(node, Optimizer)
    if wants_fit(node):
        if node.get("task_vectors") is not None or node.get("loc"):
            raise InputError(
                "optimizer.scale=fit finds loc and the task vectors itself: set loc=0, task_vectors=null"
            )
        if fit is None:
            raise InputError("optimizer.scale=fit is not fitted yet")
        factory = partial(factory, loc=fit["loc"], scale=fit["scale"])
    return partial(factory, steps=steps) if "steps" in factory.keywords else factory


_ANY_FIT = {"loc": 0.0, "scale": 1.0}
