"""`Run`: one configuration, the objects built from it, and the store in which its artifacts are made and found.

Stages (`finetune.py`, `curvature.py`, `merge.py`, `evaluate.py`, `report.py`) are functions of a `Run`. They
declare artifacts as nodes (`nodes.py`) and call `Run.make`, which finds each in the store or makes it.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from rich.progress import track
from torch import Tensor, nn

from mergekit_lab.backbones import Backbone, Objective, Parametrization
from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.compiled import compile_model
from mergekit_lab.digests import Version
from mergekit_lab.errors import InputError
from mergekit_lab.memory import read_free_memory, read_total_memory
from mergekit_lab.merging import resolve_device
from mergekit_lab.merging.devices import parse_devices
from mergekit_lab.merging.transfers import send_whole
from mergekit_lab.paths import find_default_store
from mergekit_lab.reporting import Timing, Tracker
from mergekit_lab.runs.checks import check_tasks, check_units
from mergekit_lab.runs.given_up import give_up, read_reason
from mergekit_lab.runs.keeper import StoreKeeper
from mergekit_lab.runs.mergers import build_mergers
from mergekit_lab.runs.nodes import Node
from mergekit_lab.runs.own_code import describe_code
from mergekit_lab.runs.settle import find_weights_key
from mergekit_lab.runs.spread import spread
from mergekit_lab.schema.check import build
from mergekit_lab.schema.run import Curvature, Search, TrainerSettings
from mergekit_lab.store import Artifact, Store
from mergekit_lab.tasks import HarnessTask, Task
from mergekit_lab.training import TrainingSettings
from mergekit_lab.workers import Pool

log = logging.getLogger(__name__)
Item = TypeVar("Item")

MODEL = "model.safetensors"
"""The file of weights in an artifact that is a model."""
State = dict[str, Tensor]
HeldKey = tuple[Path, Version | None] | None
"""Names weights that stay on a device: a file with its version, or None for the base."""
_SHARE = 8
"""Copies of weights that only save time may take one eighth of a device's memory."""
SPREAD = 4
"""Processes of `device=spread` on a CPU at most. Each takes a gigabyte."""
_ERASE = "\r\x1b[2K"
"""Clears a terminal's line, on which another process may have drawn a progress bar."""
_OF_CLASSES = ("backbone", "finetuning", "optimizer", "optimizer_of", "mergers", "merger")
"""Keys whose classes may come from outside, and enter keys of artifacts."""
_ONCE_A_SWEEP = ("finetune", "curvature")
"""If an artifact of these stages fails, no other job of the sweep tries it again: they take long."""


class Run:
    """One configuration, with the objects that it names.

    Args:
        cfg: the composed, checked configuration.
        folder: where its report goes.
        choices: the option chosen in each group. Records contain these names.
        shared: backbones and tasks by their configuration. Runs with the same mapping share them, because
            reading a task's data for its fingerprint takes seconds.
    """

    def __init__(
        self, cfg: DictConfig, folder: Path, choices: Mapping[str, str], shared: dict[str, Any] | None = None
    ) -> None:
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
        self.cfg = cfg
        self.plain: dict[str, Any] = plain
        self.folder = folder
        self.choices = choices
        self.seed: int = cfg.seed
        self.training = TrainingSettings(**plain["training"])
        self.curvature = Curvature(**plain["curvature"])
        self.search = Search(**plain["search"])
        self.trainer = TrainerSettings(**plain["trainer"])
        self.devices = [str(resolve_device(each)) for each in parse_devices(plain["device"], SPREAD)]
        self.device = resolve_device(self.devices[0])
        self.store = Store(Path(cfg.store.root).expanduser() if cfg.store.root else find_default_store())
        self._shared: dict[str, Any] = {} if shared is None else shared
        self.backbone: Backbone = self._build(cfg.backbone, Backbone)
        self.parametrization = build(cfg.finetuning, Parametrization)
        self.tasks: dict[str, Task] = {name: self._build(node, Task) for name, node in cfg.suite.tasks.items()}
        self.models: dict[str, str] = plain["models"] or {}
        """Checkpoints that are scored as they are, by name."""
        self.learned = [name for name, task in self.tasks.items() if not isinstance(task, HarnessTask)]
        """Tasks that are learned. The others are lm-evaluation-harness's, which are only scored."""
        self.has_harness = len(self.learned) < len(self.tasks)
        named = list(plain["experts"]) if isinstance(plain["experts"], dict) else []
        self.experts: list[str] = [] if self.models else self.learned or named
        """Names of the experts: their tasks', or given ones where nothing is learned."""
        check_tasks(self)
        mergers = dict(cfg.mergers)
        if cfg.merger is not None:
            mergers = {choices.get("merger") or "merger": cfg.merger}
        self.mergers = build_mergers(mergers, self.search, self.experts)
        self.only: list[str] | None = plain["only"]
        check_units(self)
        describe_code([plain[name] for name in _OF_CLASSES])  # now, for files may be edited while the run works
        self.tracker = build(cfg.logger, Tracker)
        self.timings: dict[str, Timing] = {}
        self.new_keys: set[str] = set()
        """Keys of the artifacts that this run made, in this process or in a worker."""
        self.arguments: Sequence[str] = ()
        """Overrides, as on the command line."""
        self.nodes: dict[Any, Node] = {}
        self.obtained: set[str] = set()
        """Keys of artifacts that this run has made or found, in this process or in a worker."""
        self._logged: dict[str, str] = {}
        """By the name of a node, how the tracker refers to its artifact."""
        self._objectives: dict[str, Objective] = {}
        self.moved: dict[HeldKey, State] = {}
        """Weights that stay on the device for the next merge, see `combine.move_models`."""
        self._compiled: nn.Module | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_in_worker, (pickle.dumps((self.plain, self.folder, dict(self.choices))),)

    def _build(self, node: DictConfig, kind: type) -> Any:
        """Build an object, or take the shared one. If its `keep` is unset, it keeps files in the store."""
        name = OmegaConf.to_yaml(node, resolve=True, sort_keys=True)
        if name not in self._shared:
            self._shared[name] = build(node, kind)
        built = self._shared[name]
        if getattr(built, "keep", "") is None:
            return replace(built, keep=StoreKeeper(self.store, self.cfg.images_limit_gb, self.device))
        return built

    def open_backbone(self, source: str) -> Backbone:
        """The run's backbone with the weights of another checkpoint, which may be of another architecture."""
        node: Any = OmegaConf.merge(self.cfg.backbone, {find_weights_key(self.cfg.backbone): source})
        backbone: Backbone = self._build(node, Backbone)
        return backbone

    def vary(self, changes: Mapping[str, Any]) -> Run:
        """A copy of this run with a changed configuration. It reports to no tracker. Close it after use."""
        cfg: Any = OmegaConf.merge(self.cfg, changes)
        run = Run(cfg, self.folder, self.choices, self._shared)
        run.tracker, run.new_keys, run.obtained, run.only = Tracker(), self.new_keys, self.obtained, self.only
        if not changes.keys() & {"backbone", "finetuning", "device"}:
            built = {name: value for name, value in vars(self).items() if name in ("model", "base_state")}
            vars(run).update(built)
        return run

    def name_optimizer(self, task: str | None = None) -> str:
        """The optimizer's name in records.

        A task with its own optimizer has that option's name. Otherwise it is the run's option, with its base
        unless that is AdamW, and the options of single tasks: "mergopt over sgd, sam cars".
        """
        own = {t: self.choices.get(f"optimizer@optimizer_of.{t}", "other") for t in self.cfg.optimizer_of}
        if task in own:
            return own[task]
        base = self.choices.get("optimizer@optimizer.base", "adamw")
        name = self.choices["optimizer"] + (f" over {base}" if base != "adamw" else "")
        return ", ".join([name, *(f"{option} {each}" for each, option in own.items())])

    @property
    def processes(self) -> int:
        """How many processes train one expert together."""
        return self.trainer.processes or len(self.devices)

    @cached_property
    def pool(self) -> Pool:
        """Worker processes, one for each device."""
        return Pool(self.devices)

    @cached_property
    def base_content(self) -> dict[str, Any]:
        """What decides the base; part of the contents of artifacts."""
        return self.describe_backbone(self.backbone)

    def describe_backbone(self, backbone: Backbone) -> dict[str, Any]:
        """What decides the weights of a backbone of the run's class, and what it computes."""
        return {**backbone.identify(), **describe_code(self.plain["backbone"])}

    @cached_property
    def base_state(self) -> dict[str, Tensor]:
        """`θ0`, on the CPU."""
        return {n: t.detach().cpu().clone() for n, t in self.backbone.make_model().state_dict().items()}

    @cached_property
    def model(self) -> nn.Module:
        """One model for all evaluations. Its weights are those that were loaded last.

        It computes what experts compute. For linearized experts that is the expansion around the base.
        """
        return self.parametrization.make_evaluable(self.backbone.make_model()).to(self.device)

    def read_room(self, held: int = 0) -> int:
        """Bytes that copies of weights may take on the device, if `held` bytes are such copies; 0 on a CPU."""
        free = read_free_memory(self.device) + held
        return min(read_total_memory(self.device) // _SHARE, free // 2)

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Write weights into the run's model."""
        held = dict(state)
        fits = sum(tensor.nbytes for tensor in held.values()) <= self.read_room()
        self.model.load_state_dict(move_state(held, self.device) if fits else held)

    def find_model_to_score(self, task: str) -> nn.Module:
        """The run's model for scores on a task, compiled if `evaluation_compile` asks for it and it can be."""
        objective = self.make_objective(task)
        if not self.cfg.evaluation_compile or not objective.replays_forward:
            return self.model
        if self._compiled is None:
            index = torch.arange(min(self.cfg.evaluation_batch_size, self.tasks[task].count("validation")))

            def use(model: nn.Module) -> None:
                with torch.inference_mode():
                    objective.predict(model.eval(), "validation", index)

            self._compiled = compile_model(self.model, use, "evaluation_compile")
        return self._compiled

    def make_objective(self, task: str) -> Objective:
        """A task's objective, which trains and scores the backbone on it, on the run's device."""
        if task not in self._objectives:
            self._objectives[task] = self.backbone.make_objective(self.tasks[task])
        return self._objectives[task].to(self.device)

    def describe_data(self, tasks: Sequence[str]) -> dict[str, str]:
        """The fingerprints of these tasks' data."""
        return {task: self.tasks[task].fingerprint() for task in tasks}

    def describe_scoring(self, task: str) -> dict[str, Any]:
        """What decides a score besides model and data; empty if the backbone has one way to score."""
        how = self.backbone.describe_scoring(self.tasks[task])
        return {"scoring": how} if how else {}

    def find(self, node: Node) -> Artifact | None:
        """The artifact, if it is in the store."""
        return self.store.find(node.kind, node.content)

    def need(self, node: Node) -> Artifact:
        """The artifact, which an earlier stage made.

        Raises:
            InputError: it is not in the store.
        """
        artifact = self.find(node)
        if artifact is None:
            raise InputError(
                f"{node.label} is not in the store {self.store.root}: run stage={node.stage} first"
            )
        self._log_product(node, artifact)
        return artifact

    def obtain(self, node: Node) -> Artifact:
        """The artifact, made if it is not in the store. The stage that obtains it first counts it.

        Raises:
            InputError: a node that it awaits is not made, or another job of the same sweep failed to make it.
        """
        for earlier in node.awaits:
            self.need(earlier)
        reason = read_reason(node.name)
        if reason and not self.find(node):
            raise InputError(reason)
        try:
            artifact = self.store.obtain(node.kind, node.content, node.make)
        except Exception as error:
            if node.stage in _ONCE_A_SWEEP:
                give_up(node.name, f"{node.label} ({node.kind} {node.key}) could not be made in {self.folder}, "
                        f"once for all jobs of this sweep that need it: {error}")  # fmt: skip
            raise
        if not artifact.reused:
            self.new_keys.add(artifact.key)
        self.obtained.add(artifact.key)
        self._log_product(node, artifact)
        return artifact

    def make(
        self, stage: Callable[[Run], None] | None, nodes: Sequence[Node], title: str | None = None
    ) -> None:
        """Find or make these nodes' artifacts, and report them to log and tracker.

        With several devices, workers first run `stage` for one unit each. This process then finds what they
        made.

        Args:
            stage: the calling stage, importable by its name. None: nothing is given to workers.
            title: of the progress bar. None: there is none, because the makers show their own.
        """
        if stage is not None and len(self.devices) > 1:
            spread(self, stage, nodes)
        mine = [node for node in nodes if self.is_mine(node.unit)]
        for node in mine if title is None else self.track(mine, title):
            artifact = self.obtain(node)
            for step, point in enumerate(node.list_points(artifact)):
                self.tracker.log({f"{node.unit}/{name}": value for name, value in point.items()}, step)
            worker_said = artifact.reused and artifact.key in self.new_keys
            if node.say is not None and not worker_said:
                log.info("%s", node.say(artifact))

    def track(self, items: Iterable[Item], title: str, total: int | None = None) -> Iterable[Item]:
        """The items, with a progress bar that vanishes at the end."""
        return track(items, title, total, disable=not self.cfg.progress, transient=True)

    def _log_product(self, node: Node, artifact: Artifact) -> None:
        """Report an artifact to the tracker, with references to the reported ones that it was made of."""
        inputs = tuple(filter(None, (self._logged.get(each.name) for each in node.needs)))
        product = node.describe_product(self, artifact, inputs)
        self._logged[node.name] = product.reference
        self.tracker.log_product(product)

    def is_mine(self, unit: str | None) -> bool:
        """Whether this process works on a task, a merger or the joint model ("+joint")."""
        return self.only is None or unit is None or unit in self.only

    @contextmanager
    def work_on(self, units: list[str]) -> Iterator[None]:
        """Work on these units alone within the block."""
        before, self.only = self.only, units
        try:
            yield
        finally:
            self.only = before

    def close(self) -> None:
        """End the processes on other devices."""
        if "pool" in vars(self):
            self.pool.close()
            del self.pool

    @contextmanager
    def time_stage(self, stage: str) -> Iterator[None]:
        """Record a stage's seconds, and how many of its artifacts were made; each counts once a run."""
        begun, before = time.monotonic(), set(self.obtained)
        yield
        seconds, own = time.monotonic() - begun, self.obtained - before
        computed = len(own & self.new_keys)
        self.timings[stage] = Timing(round(seconds, 2), computed, len(own) - computed)
        log.info("%s: %.1f s, %d computed, %d found in the store", stage, seconds, computed,
                 len(own) - computed)  # fmt: skip


@lru_cache(maxsize=1)
def _make_in_worker(content: bytes) -> Run:
    """A pickled run in a worker. Later jobs of the same run get the same object. It reports to no tracker."""
    logging.basicConfig(format=f"{_ERASE if sys.stdout.isatty() else ''}%(message)s", stream=sys.stdout)
    plain, folder, choices = pickle.loads(content)
    run = Run(OmegaConf.create(plain), folder, choices)
    run.tracker = Tracker()
    return run


def say_seconds(artifact: Artifact) -> str:
    """How long it took to make an artifact, for the log."""
    return "found in the store" if artifact.reused else f"{artifact.info['wall_seconds']:.1f} s"


def load_state(artifact: Artifact) -> dict[str, Tensor]:
    """All tensors of an artifact that is a model."""
    checkpoint = open_checkpoint(artifact.find_file(MODEL), f"{artifact.kind} {artifact.key}")
    return {tensor: checkpoint[tensor] for tensor in checkpoint}


def move_state(state: Mapping[str, Tensor], device: torch.device) -> State:
    """The state on a device. Weights that are tied stay tied."""
    held = dict(state.items())  # keep all tensors alive, so that no address is used twice
    keys = {n: (t.data_ptr(), t.dtype, t.shape, t.stride()) for n, t in held.items()}
    moved = {key: send_whole(held[name], device) for name, key in keys.items()}
    return {name: moved[key] for name, key in keys.items()}
