"""`Node`: an artifact of a run before it is made, with what decides it, what it is made of, and how it is made.

Every kind of artifact is declared by a function next to its maker: `declare_expert`, `declare_side_input`,
`declare_search`, `declare_merged`, `declare_evaluation`, …  `graph.list_nodes` lists all nodes of a run. Dry
runs, pruning, shared trainings, lineage and estimates of time walk over them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

from mergekit_lab.reporting import Product
from mergekit_lab.store import Artifact, Workspace, make_key


@dataclass(frozen=True, eq=False)
class Node:
    """An artifact of a run, made or not.

    Attributes:
        kind: the store's folder for it, such as "experts".
        label: its name in messages, such as "the expert of cars".
        stage: the stage that makes it.
        unit: the task, the merger or "+joint" that it is made for. Workers are given units, and `only` names
            them. None: it is made by the first process that needs it.
        decide: returns its content, which is everything that decides it. Called when the key is needed.
        make: writes its files into a workspace and returns its info.
        needs: the nodes that it is made of.
        awaits: nodes whose results are part of this node's content, such as the search that chose its
            coefficient. Until they are made, `decide` returns a placeholder, under which nothing is published.
        say: the line of the log about the finished artifact; None: no line.
        list_points: numbers for a tracker, one mapping for each step.
    """

    kind: str
    label: str
    stage: str
    unit: str | None
    decide: Callable[[], Mapping[str, Any]]
    make: Callable[[Workspace], Mapping[str, Any]]
    needs: tuple[Node, ...] = ()
    awaits: tuple[Node, ...] = ()
    say: Callable[[Artifact], str] | None = None
    list_points: Callable[[Artifact], Sequence[Mapping[str, float]]] = lambda artifact: ()

    @property
    def content(self) -> Mapping[str, Any]:
        """What decides it."""
        return self.decide() if self.awaits else self._content

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        return self.decide()

    @property
    def key(self) -> str:
        """The hash of its content."""
        return make_key(self.content)

    @property
    def name(self) -> str:
        """`KIND-KEY`."""
        return f"{self.kind}-{self.key}"

    def describe_product(self, run: Any, artifact: Artifact, inputs: tuple[str, ...]) -> Product:
        """The artifact as trackers show it: a name, a description, and numbers to compare it by.

        Args:
            inputs: how the tracker refers to the products that it was made of.
        """
        settings = {
            "backbone": run.choices.get("backbone"),
            "suite": run.plain["suite"]["name"],
            "finetuning": run.choices.get("finetuning"),
            "optimizer": "imported" if run.cfg.experts else run.name_optimizer(self.unit),
            "seed": run.seed,
        }
        words = [word for word in self.label.split() if word not in ("the", "of", "on", "offsets")]
        name = "-".join([*words, settings["optimizer"], f"s{settings['seed']}"])
        description = ", ".join(f"{setting} {value}" for setting, value in settings.items())
        numbers = {n: v for n, v in artifact.info.items() if isinstance(v, str | int | float | bool)}
        return Product(
            re.sub(r"[^\w.-]+", "-", name)[:120],
            artifact.key,
            artifact.kind,
            artifact.folder,
            inputs,
            f"{self.label[:1].upper()}{self.label[1:]}: {description}.",
            {**settings, "unit": self.unit, **numbers},
        )


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """These nodes and all that they need, each once and after its own needs."""
    seen: set[Node] = set()

    def visit(node: Node) -> Iterator[Node]:
        if node not in seen:
            seen.add(node)
            for each in node.needs:
                yield from visit(each)
            yield node

    for node in nodes:
        yield from visit(node)


Declaration = TypeVar("Declaration", bound=Callable[..., Node])


def declare(function: Declaration) -> Declaration:
    """Decorate a declaration: for the same run and names it returns the same node."""

    @wraps(function)
    def declare_once(run: Any, *names: Any) -> Node:
        if (function, names) not in run.nodes:
            run.nodes[function, names] = function(run, *names)
        return run.nodes[function, names]

    return cast(Declaration, declare_once)
