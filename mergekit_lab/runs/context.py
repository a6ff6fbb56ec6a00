"""What all stages of a run share while it is under way."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from mergekit_lab.backbones import Objective
from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.errors import InputError, suggestion
from mergekit_lab.merging import resolve_device
from mergekit_lab.reporting import Product, Timing, Tracker
from mergekit_lab.runs.given_up import KINDS, give_up, given_up
from mergekit_lab.runs.setup import Setup
from mergekit_lab.schema.check import build
from mergekit_lab.store import Artifact, content_key
from mergekit_lab.workers import Pool, import_ahead

log = logging.getLogger(__name__)


class Context(Setup):
    """A run under way: its model, its artifacts and the processes that make them.

    Args:
        cfg: the composed, checked configuration.
        folder: where the run's report goes.
        choices: which option of each group was taken; names in records.
        shared: see `Setup`.
    """

    def __init__(
        self,
        cfg: DictConfig,
        folder: Path,
        choices: Mapping[str, str],
        shared: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(cfg, choices, shared)
        self.folder = folder
        self.device = resolve_device(self.devices[0])
        self.tracker: Tracker = build(cfg.logger)
        self.timings: dict[str, Timing] = {}
        self.made: set[str] = set()
        self._told: dict[str, str] = {}
        self._counts = {"computed": 0, "reused": 0}
        self._pool: Pool | None = None
        self.only: list[str] | None = self.plain["only"]
        names = [*self.tasks, *self.mergers, "+joint"]
        for name in self.only or ():
            if name not in names:
                raise InputError(f"only names {name!r}{suggestion(name, names)}")

    def variant(self, changes: Mapping[str, Any]) -> Context:
        """The same run with other values in its configuration; trackers do not hear of it.

        Close it after use.
        """
        cfg: Any = OmegaConf.merge(self.cfg, changes)
        made = Context(cfg, self.folder, self.choices, self._shared)
        made.tracker, made.made, made._counts, made.only = Tracker(), self.made, self._counts, self.only
        return made

    @cached_property
    def model(self) -> nn.Module:
        """One model for all evaluations; its weights are whatever was loaded last.

        It computes what experts compute: of linearized experts, the expansion around the backbone's weights.
        """
        return self.parametrization.make_evaluable(self.backbone.model()).to(self.device)

    @cached_property
    def base_state(self) -> dict[str, Tensor]:
        """`θ0`, on the CPU."""
        return {n: t.detach().cpu().clone() for n, t in self.backbone.model().state_dict().items()}

    def objective(self, task: str) -> Objective:
        """How the backbone learns a task and is scored on it; on the run's device."""
        if task not in self._objectives:
            self._objectives[task] = self.backbone.objective(self.tasks[task])
        return self._objectives[task].to(self.device)

    @cached_property
    def _objectives(self) -> dict[str, Objective]:
        return {}

    def obtain(self, kind: str, content: Mapping[str, Any], make: Any) -> Artifact:
        """`Store.obtain`, counted for the stage in progress.

        Raises:
            InputError: the sweep that this run is a job of tried to make it for all of its jobs, and failed.
        """
        name = f"{kind}-{content_key(content)}"
        failed = given_up(name)
        if failed and not self.store.find(kind, content):
            raise InputError(failed)
        try:
            artifact = self.store.obtain(kind, content, make)
        except Exception as error:
            if kind in KINDS:
                give_up(name, f"{_called(kind, content)} could not be made in {self.folder}, once for all jobs "
                        f"of this sweep that need it: {error}")  # fmt: skip
            raise
        made = not artifact.reused or artifact.key in self.made
        self._counts["computed" if made else "reused"] += 1
        if not artifact.reused:
            self.made.add(artifact.key)
        self._tell(artifact)
        return artifact

    def expert(self, task: str) -> Artifact:
        return self.made_earlier("experts", self.expert_content(task), f"the expert of {task}", "finetune")

    def side(self, kind: str, task: str) -> Artifact:
        """An expert's Fisher or Grams, in the file `<kind>.safetensors`."""
        return self.made_earlier(
            f"{kind}s", self.side_content(kind, task), f"the {kind} of {task}", "curvature"
        )

    def made_earlier(self, kind: str, content: Mapping[str, Any], what: str, stage: str) -> Artifact:
        found = self.store.find(kind, content)
        if found is None:
            raise InputError(f"{what} is not in the store {self.store.root}: run stage={stage} first")
        self._tell(found)
        return found

    def _tell(self, artifact: Artifact) -> None:
        """Tell the tracker of an artifact and, from the keys in its content, of what it was made of."""
        name = f"{artifact.kind}-{artifact.key}"
        inputs = tuple(dict.fromkeys(self._told[key] for key in _texts(artifact.content) if key in self._told))
        self._told[artifact.key] = name
        self.tracker.log_product(Product(name, artifact.kind, artifact.folder, inputs))

    def mine(self, name: str) -> bool:
        """Whether this process is to work on a task, a merger or the joint model ("+joint")."""
        return self.only is None or name in self.only

    @contextmanager
    def working_on(self, names: list[str]) -> Iterator[None]:
        """Work on these names meanwhile."""
        before, self.only = self.only, names
        try:
            yield
        finally:
            self.only = before

    def spread(self, function: Callable[[Context], None], names: Sequence[str]) -> None:
        """Do `function(run)` for each name alone, on as many processes as the run has devices.

        What they make is in the store afterwards. With one device or one name nothing happens: the caller's
        own loop does the work.

        Args:
            function: reads `mine`; importable by its name.
            names: of what is not in the store yet, the longest work first.

        Raises:
            InputError: a user's mistake in one of them, after the others are done.
            RuntimeError: another failure.
        """
        if len(self.devices) < 2 or len(names) < 2:
            return
        if self._pool is None:
            import_ahead([function.__module__])
            self._pool = Pool(self.devices)
        log.info("%s on %d devices, a process each", ", ".join(names), len(self.devices))
        jobs = [(function, self._for_worker(), str(self.folder), dict(self.choices), name) for name in names]
        outcomes = self._pool.map(_work, jobs)
        for outcome in outcomes:
            self.made |= outcome.value or set()
        failed = {name: o for name, o in zip(names, outcomes, strict=True) if o.error is not None}
        if failed:
            told = "; ".join(f"{name}: {outcome.error}" for name, outcome in failed.items())
            raise (InputError if all(o.mistake for o in failed.values()) else RuntimeError)(told)

    def _for_worker(self) -> dict[str, Any]:
        device = "cuda:0" if self.device.type == "cuda" else "cpu"
        return self.plain | {"device": device, "progress": False}

    def close(self) -> None:
        """End the processes on other devices."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Record a stage's seconds, and how many of its artifacts were made."""
        begun = time.monotonic()
        self._counts = {"computed": 0, "reused": 0}
        yield
        self.timings[stage] = Timing(round(time.monotonic() - begun, 2), **self._counts)
        log.info("%s: %.1f s, %d computed, %d found in the store", stage, time.monotonic() - begun,
                 self._counts["computed"], self._counts["reused"])  # fmt: skip


def _called(kind: str, content: Mapping[str, Any]) -> str:
    named = f"{kind} {content_key(content)}"
    return f"{content['task']} ({named})" if "task" in content else named


_latest: list[Any] = []


def _work(
    function: Callable[[Context], None], plain: dict[str, Any], folder: str, choices: dict[str, str], name: str
) -> set[str]:
    """In a worker: `function` for one name, with the objects that an earlier job of the run left."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("mergekit_lab").setLevel(logging.INFO)
    if not _latest or _latest[0] != plain:
        _latest[:] = plain, Context(OmegaConf.create(plain), Path(folder), choices)
        _latest[1].tracker = Tracker()
    context: Context = _latest[1]
    context.made.clear()
    with context.working_on([name]):
        function(context)
    return set(context.made)


def _texts(content: Any) -> Iterator[str]:
    """Every string in a JSON-able value."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping | list | tuple):
        for part in content.values() if isinstance(content, Mapping) else content:
            yield from _texts(part)


def load_state(artifact: Artifact, name: str = "model.safetensors") -> dict[str, Tensor]:
    """All tensors of an artifact's file."""
    checkpoint = open_checkpoint(artifact.file(name), f"{artifact.kind} {artifact.key}")
    return {tensor: checkpoint[tensor] for tensor in checkpoint}
