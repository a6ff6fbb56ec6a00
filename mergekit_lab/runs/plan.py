"""What runs would compute, before they do: distinct artifacts, how many are in the store, about how long.

Keys follow from content, so a plan needs no work, with one exception: the coefficient of a merged model that
validation chooses is in its key, so until the search is done such a model and its evaluations are counted under
a name of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mergekit_lab.runs.adaptive import learning_content, learns
from mergekit_lab.runs.context import Context
from mergekit_lab.runs.evaluate import Subject, evaluation_content
from mergekit_lab.runs.merge import merged_content
from mergekit_lab.runs.setup import Merger
from mergekit_lab.schema.run import wants_fit
from mergekit_lab.store import Store, content_key

_ORDER = ("experts", "fits", "joint", "fishers", "grams", "searches", "coefficients", "merged", "evaluations")


@dataclass(frozen=True)
class Piece:
    """An artifact that a run wants.

    Attributes:
        kind, key: its name in the store.
        content: what decides it.
        made: it is there.
    """

    kind: str
    key: str
    content: Mapping[str, Any]
    made: bool


@dataclass(frozen=True)
class Work:
    """A training job that several runs share.

    Attributes:
        job: which run's configuration makes it.
        only: the name it is for, of a task or "+joint"; None for all, whose offsets are fitted together.
    """

    job: int
    only: str | None


@dataclass
class Plan:
    """The distinct pieces of several runs, by kind and key."""

    pieces: dict[tuple[str, str], Piece] = field(default_factory=dict)
    runs: int = 0
    store: Store | None = None

    @staticmethod
    def of(contexts: Sequence[Context]) -> Plan:
        """The union of what all these runs would compute."""
        plan = Plan(runs=len(contexts), store=contexts[0].store)
        for context in contexts:
            for piece in pieces(context):
                plan.pieces.setdefault((piece.kind, piece.key), piece)
        return plan

    def text(self) -> str:
        """A table: kind, how many, how many of them are in the store, seconds for the rest."""
        assert self.store is not None
        records = list(self.store.artifacts())
        rows = [("", "distinct", "in the store", "to make", "about")]
        total, open_ended = 0.0, False
        for kind in [k for k in _ORDER if any(k == piece.kind for piece in self.pieces.values())]:
            mine = [piece for piece in self.pieces.values() if piece.kind == kind]
            missing = [piece for piece in mine if not piece.made]
            guesses = [_seconds(piece, records) for piece in missing]
            known = [guess for guess in guesses if guess is not None]
            open_ended = open_ended or len(known) < len(guesses)
            total += sum(known)
            told = "unknown" if missing and not known else _duration(sum(known))
            rows.append((kind, str(len(mine)), str(len(mine) - len(missing)), str(len(missing)), told))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        end = " and what nothing like it was made of yet" if open_ended else ""
        return "\n".join(
            [
                f"{self.runs} run{'s' if self.runs > 1 else ''}, store {self.store.root}",
                *lines,
                f"In all about {_duration(total)} on one device{end}, from the times of earlier ones.",
            ]
        )


def pieces(run: Context) -> Iterator[Piece]:
    """All artifacts that one run wants, in the order of its stages."""

    def piece(kind: str, content: Mapping[str, Any]) -> Piece:
        return Piece(kind, content_key(content), content, run.store.find(kind, content) is not None)

    if wants_fit(run.cfg.optimizer):
        for task in run.tasks:
            yield piece("experts", run.pilot_content(task))
        yield piece("fits", run.fit_content())
    for task in run.tasks:
        yield piece("experts", run.expert_content(task))
    if run.cfg.joint:
        yield piece("joint", run.joint_content())
    for kind in run.side_kinds:
        for task in run.tasks:
            yield piece(f"{kind}s", run.side_content(kind, task))
    models = [("zero_shot", content_key({"base": run.backbone_content}), tuple(run.tasks))]
    models += [("expert", content_key(run.expert_content(task)), (task,)) for task in run.tasks]
    for merger in run.mergers.values():
        if merger.searched:
            yield piece("searches", run.search_content(merger))
        if learns(merger):
            yield piece("coefficients", learning_content(run, merger))
        merged = _merged(run, merger)
        yield merged
        models.append(("merged", merged.key, tuple(run.tasks)))
    if run.cfg.joint:
        models.append(("joint", content_key(run.joint_content()), tuple(run.tasks)))
    for kind, key, tasks in models:
        for task in tasks:
            subject = Subject(kind, key, tasks, dict)
            yield piece("evaluations", evaluation_content(run, subject, task, "test"))
            if kind == "expert" and any(merger.searched for merger in run.mergers.values()):
                yield piece("evaluations", evaluation_content(run, subject, task, "validation"))


def _merged(run: Context, merger: Merger) -> Piece:
    if merger.searched and not run.store.find("searches", run.search_content(merger)):
        content = {"search": content_key(run.search_content(merger))}
        return Piece("merged", content_key(content), content, False)
    content = merged_content(run, merger)
    return Piece("merged", content_key(content), content, run.store.find("merged", content) is not None)


def shared_training(contexts: Sequence[Context]) -> list[Work]:
    """The trainings that runs need and the store lacks, each once, the joint models first (they take longest).

    Where runs want the same expert, the one that wants most of its curvature makes it, and that too.
    """
    joint: dict[str, Work] = {}
    experts: dict[str, tuple[int, Work]] = {}
    for number, run in enumerate(contexts):
        if wants_fit(run.cfg.optimizer):
            missing = [p for p in pieces(run) if p.kind in ("experts", "joint") and not p.made]
            if missing:
                experts.setdefault(content_key(run.optimizer_content), (0, Work(number, None)))
            continue
        if run.cfg.joint and not run.store.find("joint", run.joint_content()):
            joint.setdefault(content_key(run.joint_content()), Work(number, "+joint"))
        sides = len({kind for merger in run.mergers.values() for kind in merger.method.side_inputs})
        for task in run.tasks:
            content = run.expert_content(task)
            key = content_key(content)
            if key in experts and experts[key][0] >= sides:
                continue
            if not run.store.find("experts", content):
                experts[key] = (sides, Work(number, task))
    return [*joint.values(), *(work for _, work in experts.values())]


def unmade(run: Context, work: Work) -> list[tuple[str, str]]:
    """Kinds and keys of what a training job was to make, with the curvature that its run wants, and did not."""
    if work.only == "+joint":
        wanted = [("joint", run.joint_content())]
    else:
        tasks = list(run.tasks) if work.only is None else [work.only]
        wanted = [("experts", run.expert_content(task)) for task in tasks]
        wanted += [(f"{kind}s", run.side_content(kind, task)) for kind in run.side_kinds for task in tasks]
        if work.only is None:
            wanted += [("experts", run.pilot_content(task)) for task in tasks] + [("fits", run.fit_content())]
            wanted += [("joint", run.joint_content())] if run.cfg.joint else []
    return [(kind, content_key(content)) for kind, content in wanted if not run.store.find(kind, content)]


def _seconds(piece: Piece, records: Sequence[Any]) -> float | None:
    """The median of like artifacts: of the same kind, and of the same backbone and optimizer as far as there
    are any; a training's is scaled by its steps."""
    like = [r for r in records if r.kind == piece.kind and "wall_seconds" in r.info]
    for name in ("backbone", "optimizer", "method"):
        closer = [r for r in like if r.content.get(name) == piece.content.get(name)]
        like = closer or like
    if not like:
        return None
    steps = _steps(piece.content)
    return statistics.median(
        r.info["wall_seconds"] * (steps / _steps(r.content) if steps and _steps(r.content) else 1) for r in like
    )


def _steps(content: Mapping[str, Any]) -> float:
    return float(content.get("training", {}).get("steps", 0))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
