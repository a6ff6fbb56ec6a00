"""The methods of mergekit recipes: one of ours for each tensor, and what mergekit alone does.

Learned from what mergekit 0.1.5 computes. With `x_t` the weighted, thinned task vector of an expert:

| merge_method             | thinned by                       | merged as, times lambda                     |
|--------------------------|----------------------------------|---------------------------------------------|
| task_arithmetic          | –                                | Σ x_t, by Σ w_t if `normalize`              |
| ties                     | magnitude, at least one entry    | Σ of the entries that agree, by their Σ w_t |
| dare_linear, dare_ties   | chance, `rescale` to the L1 norm | as task_arithmetic, as ties                 |
| breadcrumbs, …_ties      | magnitude, both tails            | as task_arithmetic, as ties                 |
| della, della_linear      | chance by rank of magnitude      | as ties, as task_arithmetic                 |
| linear                   | –                                | Σ w_t θ_t, by Σ w_t if `normalize`          |

slerp, nuslerp, multislerp, karcher, model_stock, sce, ram, ramplus_tl, nearswap, arcee_fusion and passthrough
are the methods here of those names; nuslerp and multislerp of task vectors where there is a base_model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.merging import (
    DARE,
    RAM,
    SCE,
    SLERP,
    TIES,
    ArceeFusion,
    Karcher,
    Method,
    ModelStock,
    MultiSLERP,
    NearSwap,
    NuSLERP,
    Passthrough,
    Site,
    TaskArithmetic,
    WeightAverage,
)
from mergekit_lab.merging.breadcrumbs import keep_middle
from mergekit_lab.merging.contract import Blocks
from mergekit_lab.merging.della import assign_probabilities
from mergekit_lab.merging.dropping import Counters, draw_uniform, make_counters, restore_norm
from mergekit_lab.merging.model_stock import compute_ratio
from mergekit_lab.merging.selection import keep_largest
from mergekit_lab.merging.sparsified import SparsifiedMethod
from mergekit_lab.ranges import require

REQUIRED = object()
"""The default of a parameter that a recipe must give."""

_TASK_VECTORS: dict[str, Any] = {"weight": REQUIRED, "density": 1.0, "lambda": 1.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "linear": {"weight": REQUIRED, "normalize": True},
    "task_arithmetic": {**_TASK_VECTORS, "normalize": False, "rescale": False},
    "ties": {**_TASK_VECTORS, "normalize": True, "rescale": False},
    "dare_linear": {**_TASK_VECTORS, "normalize": False, "rescale": True},
    "dare_ties": {**_TASK_VECTORS, "normalize": False, "rescale": True},
    "breadcrumbs": {**_TASK_VECTORS, "normalize": False, "rescale": False, "gamma": 0.01},
    "breadcrumbs_ties": {**_TASK_VECTORS, "normalize": False, "rescale": False, "gamma": 0.01},
    "della": {**_TASK_VECTORS, "normalize": True, "rescale": True, "epsilon": 0.15},
    "della_linear": {**_TASK_VECTORS, "normalize": False, "rescale": True, "epsilon": 0.15},
    "slerp": {"t": REQUIRED},
    "model_stock": {"filter_wise": False},
    "nuslerp": {"weight": REQUIRED, "nuslerp_flatten": True, "nuslerp_row_wise": False},
    "multislerp": {"weight": REQUIRED, "normalize_weights": True, "eps": 1e-8},
    "karcher": {"max_iter": 10, "tol": 1e-5},
    "sce": {"select_topk": 1.0},
    "ram": {"epsilon": 1e-5},
    "ramplus_tl": {"epsilon": 1e-5, "r": 0.1, "alpha": 0.2},
    "nearswap": {"t": REQUIRED},
    "arcee_fusion": {},
    "passthrough": {"scale": 1.0},
}
"""Parameters of each merge_method, and what mergekit takes where a recipe does not say."""

BASE_IS_FIRST = {"slerp", "nearswap", "arcee_fusion"}
"""Methods that go from the base_model to one other model."""
BASE_IS_ONE_OF_ALL = {"linear", "karcher", "passthrough"}
"""Methods for which the base_model is a model as others."""
WITHOUT_BASE = {*BASE_IS_ONE_OF_ALL, "nuslerp", "multislerp"}
"""Methods that need no base_model."""
NUMBERS = dict.fromkeys(BASE_IS_FIRST | {"nuslerp"}, 2) | {"passthrough": 1}
"""How many models these merge."""


def is_per_model(merge_method: str, key: str) -> bool:
    """Whether each model has its own value of a parameter."""
    return key in _PER_MODEL and not (key == "epsilon" and merge_method.startswith("ram"))


_PER_MODEL = {"weight", "density", "gamma", "epsilon", "scale"}
_FLAGS = {*("normalize", "rescale", "filter_wise", "nuslerp_flatten", "nuslerp_row_wise", "normalize_weights")}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "density": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "gamma": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "epsilon": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "t": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "select_topk": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "max_iter": (lambda value: value >= 0 and value == int(value), "a whole number of at least 0"),
    "tol": (lambda value: value > 0, "positive"),
    "eps": (lambda value: value > 0, "positive"),
    "r": (lambda value: value >= 0, "at least 0"),
    "alpha": (lambda value: value >= 0, "at least 0"),
}
"""Those of the methods here."""
_NEARSWAP_T = (lambda value: value >= 0, "at least 0")

_THINNED = {"ties": "magnitude", "dare": "chance", "breadcrumbs": "middle", "della": "rank"}
_SMALL = 1e-8
_SHORT = 1e-6


@dataclass(frozen=True, kw_only=True)
class PerTensor(Method):
    """Another method for each tensor, at its own coefficient.

    Args:
        merge_method: mergekit's name.
        seed: of random masks.
        by_tensor: the method of every floating-point tensor.
        weights: None; they are the inner methods'.
    """

    merge_method: str
    seed: int
    by_tensor: Mapping[str, Method] = field(repr=False)

    weights_by_tensor = True

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return all(method.elementwise for method in self.by_tensor.values())

    def weigh_experts(self, experts: Sequence[str], name: str = "") -> list[float]:
        method = self.by_tensor[name] if name else next(iter(self.by_tensor.values()))
        return method.weigh_experts(experts, name)

    def survey_tensor(self, name: str, entries: int, blocks: Blocks) -> Any:
        return self.by_tensor[name].survey_tensor(name, entries, blocks)

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        method = self.by_tensor[name]
        if method.elementwise and not self.elementwise:
            flat = deltas.reshape(len(deltas), -1)
            surveyed = method.survey_tensor(name, base.numel(), lambda: iter([(base.reshape(-1), flat, site)]))
            merged = method.merge(name, base.reshape(-1), flat, replace(site, tensor=surveyed)).view(base.shape)
        else:
            merged = method.merge(name, base, deltas, site)
        return merged if method.scale == 1 else merged * method.scale


def check_parameter(merge_method: str, key: str, value: Any, name: str) -> None:
    """Refuse a parameter's value for a tensor that the methods here would refuse.

    Raises:
        InputError: out of range, true or false where a number is wanted, or a number where one of these is.
    """
    what = f"the recipe's {key} for {name}"
    if key in _FLAGS:
        require(value in (0, 1), what, value, "true or false")
    else:
        require(not isinstance(value, bool), what, value, "a number")
    fits, rule = _RANGES.get(key, (lambda _: True, ""))
    if merge_method == "nearswap" and key == "t":
        fits, rule = _NEARSWAP_T
    require(fits(value), what, value, rule)


def make_method(
    merge_method: str,
    shared: Mapping[str, Any],
    by_model: Mapping[str, list[Any]],
    entries: int,
    seed: int,
    based: bool,
) -> Method:
    """The method of one tensor.

    Args:
        merge_method: a key of `DEFAULTS`.
        shared: parameters of the tensor.
        by_model: parameters of the tensor, one an expert.
        entries: how many the tensor has.
        seed: of random masks.
        based: whether there is a base_model.
    """
    if merge_method == "linear":
        return (WeightAverage if shared["normalize"] else Sum)(weights=tuple(by_model["weight"]))
    if merge_method in _OTHERS:
        return _OTHERS[merge_method](shared, by_model, based)
    weights, densities = tuple(float(w) for w in by_model["weight"]), by_model["density"]
    family, _, ending = merge_method.partition("_")
    elects = family == "ties" or ending == "ties" or merge_method == "della"
    even = len(set(densities)) == 1 and densities[0] > 0
    thinned = _THINNED.get(family)
    if thinned == "magnitude" and even and not shared["rescale"]:
        density = min(1.0, max(float(densities[0]), (1 + 1e-9) / max(entries, 1)))
        return _make_inner(True, bool(shared["normalize"]), float(shared["lambda"]), weights, density)
    inner = _make_inner(elects, bool(shared["normalize"]), float(shared["lambda"]), weights)
    if thinned is None or (even and densities[0] == 1):
        return inner
    if thinned == "chance" and even and shared["rescale"]:
        return DARE(density=float(densities[0]), seed=seed, rescale="l1", inner=inner)
    return Thinned(
        inner=inner,
        by=thinned,
        densities=tuple(float(d) for d in densities),
        gammas=tuple(by_model.get("gamma", ())),
        epsilons=tuple(by_model.get("epsilon", ())),
        rescale=bool(shared["rescale"]),
        seed=seed,
    )


_OTHERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, list[Any]], bool], Method]] = {
    "slerp": lambda shared, by_model, based: SLERP(t=float(shared["t"])),
    "nuslerp": lambda shared, by_model, based: NuSLERP(
        along="tensor" if shared["nuslerp_flatten"] else "first" if shared["nuslerp_row_wise"] else "last",
        task_vectors=based,
        weights=tuple(by_model["weight"]),
    ),
    "multislerp": lambda shared, by_model, based: MultiSLERP(
        normalize=bool(shared["normalize_weights"]),
        epsilon=float(shared["eps"]),
        task_vectors=based,
        weights=tuple(by_model["weight"]),
    ),
    "karcher": lambda shared, by_model, based: Karcher(
        steps=int(shared["max_iter"]), tolerance=float(shared["tol"])
    ),
    "model_stock": lambda shared, by_model, based: _MergekitStock(filter_wise=bool(shared["filter_wise"])),
    "sce": lambda shared, by_model, based: SCE(
        density=float(shared["select_topk"]) or sys.float_info.min, preset="mergekit"
    ),
    "ram": lambda shared, by_model, based: RAM(epsilon=float(shared["epsilon"]), scope="tensor"),
    "ramplus_tl": lambda shared, by_model, based: RAM(
        epsilon=float(shared["epsilon"]), boost=float(shared["r"]), bound=float(shared["alpha"]), scope="tensor"
    ),
    "nearswap": lambda shared, by_model, based: NearSwap(t=float(shared["t"])),
    "arcee_fusion": lambda shared, by_model, based: ArceeFusion(),
    "passthrough": lambda shared, by_model, based: Passthrough(factor=float(by_model["scale"][0])),
}


def _make_inner(
    elects: bool, normalize: bool, scale: float, weights: tuple[float, ...], density: float = 1.0
) -> Method:
    if elects:
        return TIES(
            preset="mergekit", density=density, coefficient=scale, weights=weights,
            aggregator="mean" if normalize else "sum",
        )  # fmt: skip
    total = sum(weights)
    if normalize and abs(total) >= _SMALL:
        scale /= total
    return TaskArithmetic(coefficient=scale, weights=weights)


@dataclass(frozen=True, kw_only=True)
class Sum(Method):
    """`Σ w_t θ_t`; the base has a part only if it is one of the experts."""

    elementwise = True

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        total = (deltas * site.weights.view(-1, *[1] * base.dim())).sum(dim=0)
        return total + base * (site.weights.sum() - 1)


@dataclass(frozen=True, kw_only=True)
class Thinned(SparsifiedMethod):
    """mergekit's sparsification with a density per expert, then `inner`.

    Args:
        by: "magnitude", "chance", "middle" (Breadcrumbs) or "rank" (DELLA).
        densities: one an expert, in [0, 1].
        gammas: "middle": the share dropped at the top.
        epsilons: "rank": half the window of probabilities.
        rescale: give every thinned tensor its old L1 norm; else nothing is rescaled.
        seed: of "chance" and "rank".
    """

    by: str
    densities: tuple[float, ...]
    gammas: tuple[float, ...] = ()
    epsilons: tuple[float, ...] = ()
    rescale: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for density, epsilon in zip(self.densities, self.epsilons, strict=False):
            if 0 < density < 1 and not (density - epsilon > 0 and density + epsilon < 1):
                raise InputError(f"density {density} ± epsilon {epsilon} of the recipe leaves (0, 1)")

    def sparsify(self, name: str, deltas: Tensor, site: Site) -> Tensor:
        rows = []
        for position, (expert, delta) in enumerate(zip(site.experts, deltas, strict=True)):
            density = self.densities[position]
            if density in (0, 1):
                rows.append(delta * density)
            else:
                kept = self._draw_kept(position, delta, make_counters(self.seed, expert, site.segments))
                rows.append(restore_norm(delta, kept) if self.rescale else delta * kept)
        return torch.stack(rows)

    def _draw_kept(self, position: int, delta: Tensor, draws: Sequence[Counters]) -> Tensor:
        """1 where an entry stays."""
        density = self.densities[position]
        if self.by == "magnitude":
            return keep_largest(delta[None], max(1, int(density * delta.numel())))[0] != 0
        if self.by == "middle":
            return keep_middle(delta[None], density, self.gammas[position])[0] != 0
        chance = draw_uniform(draws, delta.device).view_as(delta)
        stay = assign_probabilities(delta, density, self.epsilons[position]) if self.by == "rank" else density
        return chance >= 1 - stay


@dataclass(frozen=True, kw_only=True)
class _MergekitStock(ModelStock):
    """`ModelStock` with mergekit's cosine, which is smaller for task vectors shorter than 1e-3."""

    elementwise = False

    def merge(self, name: str, base: Tensor, deltas: Tensor, site: Site) -> Tensor:
        experts = len(deltas)
        filters = deltas if self.filter_wise and base.dim() > 0 else deltas.reshape(experts, -1)
        norms = filters.norm(dim=-1)
        cosines = [
            ((filters[i] * filters[j]).sum(dim=-1) / (norms[i] * norms[j]).clamp(min=_SHORT)).clamp(-1, 1)
            for i in range(experts)
            for j in range(i + 1, experts)
        ]
        ratio = compute_ratio(torch.stack(cosines).mean(dim=0), experts)
        return (ratio.unsqueeze(-1) * filters.mean(dim=0)).view(base.shape)
