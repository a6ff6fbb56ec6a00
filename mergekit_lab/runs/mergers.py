"""`Merger`: a merging method as a run's configuration names it, one row of the run's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mergekit_lab import merging
from mergekit_lab.errors import InputError, join_names, suggest
from mergekit_lab.merging import Method
from mergekit_lab.schema.check import build
from mergekit_lab.schema.run import Search
from mergekit_lab.schema.target import without_null_coefficient

CHAINED, MASK = "chained_gram", "mask"
"""Side inputs that a run makes during a merge, because they depend on it. They are not artifacts."""
SIDE_INPUTS = ("fisher", "gram", CHAINED, MASK)
"""All side inputs that a run makes."""
_METHOD_FIELDS = {
    name
    for method in vars(merging).values()
    if isinstance(method, type) and issubclass(method, Method)
    for name in method.__dataclass_fields__
}
"""The fields of all merging methods. A grid may search fields that none of the run's mergers has."""


@dataclass(frozen=True, eq=False)
class Merger:
    """One row of the table.

    Attributes:
        label: its name in the table.
        method: the method. If `searched`, its coefficient is still to be chosen.
        content: the method's configuration, as it enters keys.
        searched: whether the coefficient is chosen on validation.
    """

    label: str
    method: Method
    content: Mapping[str, Any]
    searched: bool

    def with_fields(self, fields: Mapping[str, Any]) -> Method:
        """The method with other values of some fields."""
        return build({**self.content, **fields}, Method) if fields else self.method

    @property
    def coefficient(self) -> float | None:
        """The method's own coefficient; None if it has none."""
        inmost = self.method
        while hasattr(inmost, "inner"):
            inmost = inmost.inner
        value = getattr(inmost, "coefficient", ())
        return inmost.scale if value is None or isinstance(value, int | float) else None


def build_mergers(nodes: Mapping[str, DictConfig], search: Search, tasks: Sequence[str]) -> dict[str, Merger]:
    """The mergers of a configuration, by label.

    Raises:
        InputError: a merger is no merging method or does not fit the tasks, or no method has a searched field.
    """
    mergers = {label: _build(label, node, search, tuple(tasks)) for label, node in nodes.items()}
    known = {name for merger in mergers.values() for name in merger.content} | _METHOD_FIELDS
    for name in search.fields or {}:
        if mergers and name not in known:
            raise InputError(f"search.fields.{name}: no merging method has it{suggest(name, known)}")
    return mergers


def _build(label: str, node: DictConfig, search: Search, tasks: tuple[str, ...]) -> Merger:
    plain: Any = OmegaConf.to_container(node, resolve=True)
    content, is_open = without_null_coefficient(plain)
    method = build(content, Method)
    method.check(tasks)
    if unknown := set(method.side_inputs) - set(SIDE_INPUTS):
        raise InputError(
            f"mergers.{label}: {type(method).__name__} reads {join_names(unknown)}, but a run makes "
            f"only {join_names(SIDE_INPUTS)}: in Python, pass your own to merge_state_dicts(statistics=…)"
        )
    searched = is_open and search.takes_place
    if searched and method.by_task:
        raise InputError(
            f"mergers.{label}: {type(method).__name__} makes a model for every task, so its "
            "coefficient cannot be searched: set merger.coefficient=1"
        )
    if searched and search.method == "cma_es":
        _check_weighable(label, method, content, tasks)
    for fields in search.list_variants(content) if searched else ():
        build({**content, **fields}, Method).check(tasks)
    return Merger(label, method, content, searched)


def make_weight_fields(content: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that give a method these weights: its own, or those of its inner method."""
    inner = content.get("inner")
    return {"inner": {**inner, **make_weight_fields(inner, weights)}} if inner else {"weights": dict(weights)}


def say_fields(content: Mapping[str, Any], fields: Mapping[str, Any]) -> str | None:
    """The fields whose values differ from a merger's content, as overrides; None if none does."""
    changed = {name: value for name, value in fields.items() if value != content.get(name)}
    words = [
        f"{name}.{say_fields(content[name], value)}" if name == "inner" else f"{name}={_say(value)}"
        for name, value in changed.items()
    ]
    return ", ".join(words) or None


def _say(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_say(each)}" for name, each in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _check_weighable(label: str, method: Method, content: Mapping[str, Any], tasks: tuple[str, ...]) -> None:
    """Refuse a method whose weights cannot be searched, each candidate a merge."""
    way_out = "give it a coefficient (merger.coefficient=1, mergers.NAME.coefficient=1)"
    if not method.elementwise or method.side_inputs:
        why = f"reads {join_names(method.side_inputs)}" if method.side_inputs else "takes whole tensors apart"
        raise InputError(
            f"mergers.{label}: {type(method).__name__} {why} for every candidate of search.method=cma_es: "
            f"leave it out (merger=task_arithmetic, ties, dare), or {way_out}"
        )
    if method.weights is not None or getattr(getattr(method, "inner", None), "weights", None) is not None:
        raise InputError(
            f"mergers.{label}: its weights are set, but search.method=cma_es searches them: leave them "
            f"null, or {way_out}"
        )
    build({**content, **make_weight_fields(content, dict.fromkeys(tasks, 1.0))}, Method).check(tasks)
