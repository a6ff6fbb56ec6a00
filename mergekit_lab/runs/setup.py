"""What a run is: the objects its configuration names, and what its artifacts are called."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from mergekit_lab import merging
from mergekit_lab.backbones import Backbone, Parametrization
from mergekit_lab.errors import InputError, suggestion
from mergekit_lab.merging import Method, resolve_device
from mergekit_lab.merging.devices import device_names
from mergekit_lab.paths import default_store
from mergekit_lab.runs.published_experts import expert_source, imported_content
from mergekit_lab.schema.check import build, with_floats, without_null_coefficient
from mergekit_lab.schema.run import Main, Place, Search, evaluations_a_step, wants_fit
from mergekit_lab.store import Store, content_key
from mergekit_lab.tasks import Task
from mergekit_lab.training import Settings
from mergekit_lab.training.clock import machine

log = logging.getLogger(__name__)


_METHOD_FIELDS = {
    name
    for method in vars(merging).values()
    if isinstance(method, type) and issubclass(method, Method)
    for name in method.__dataclass_fields__
}
"""Of all merging methods: a shipped grid may search fields that the run's mergers happen not to have."""
_OF_PROCESSES = {"per_rank": True, "sync_ascent": False}
"""Options of optimizers with which the number of processes decides what is computed."""


@dataclass(frozen=True)
class Merger:
    """One row of the table to come.

    Attributes:
        label: what it is called.
        method: the method; where `searched`, its coefficient is still to be chosen.
        content: the method's configuration as it enters keys.
        searched: whether validation chooses the coefficient.
    """

    label: str
    method: Method
    content: Mapping[str, Any]
    searched: bool


class Setup:
    """A run's objects, and the names of what it makes.

    Args:
        cfg: the composed, checked configuration.
        choices: which option of each group was taken; names in records.
        shared: objects by their configuration, which runs that are given the same mapping share: reading a
            task's data for its fingerprint takes seconds.
    """

    def __init__(
        self, cfg: DictConfig, choices: Mapping[str, str], shared: dict[str, Any] | None = None
    ) -> None:
        cfg = with_floats(cfg, Main)
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
        self.cfg = cfg
        self.plain: dict[str, Any] = plain
        self.choices = choices
        self.store = Store(Path(cfg.store.root).expanduser() if cfg.store.root else default_store())
        self.training = Settings(**plain["training"])
        self.search = Search(**plain["search"])
        self.seed: int = cfg.seed
        self.devices = devices_of(plain["device"])
        self.place = Place(**plain["trainer"])
        self._shared = known = {} if shared is None else shared

        def built(node: DictConfig) -> Any:
            name = OmegaConf.to_yaml(node, resolve=True, sort_keys=True)
            if name not in known:
                known[name] = build(node)
            return self._kept(known[name])

        self.backbone: Backbone = built(cfg.backbone)
        self.parametrization: Parametrization = build(cfg.finetuning)
        self.tasks: dict[str, Task] = {name: built(node) for name, node in cfg.suite.tasks.items()}
        if not self.tasks:
            raise InputError("the suite has no tasks")
        for task in self.tasks.values():
            self.backbone.check(task)
        self._check_names()
        self._check_shares()
        self.mergers = self._mergers()

    @property
    def processes(self) -> int:
        """How many processes train one expert together."""
        return self.place.devices or len(self.devices)

    @property
    def side_kinds(self) -> list[str]:
        """The side inputs that this run makes: what its mergers read, and what `curvature.kind` asks for."""
        asked = [kind for merger in self.mergers.values() for kind in merger.method.side_inputs]
        return list(dict.fromkeys([*asked, *filter(None, [self.cfg.curvature.kind])]))

    def _check_names(self) -> None:
        """Options of single tasks name tasks of this run.

        `training.epochs_of` may also have those of tasks that the run leaves out, as a suite's recipe has for a
        part of it; a name that is near a task without epochs of its own is a slip.
        """
        epochs = self.training.epochs_of or {}
        without = [task for task in self.tasks if task not in epochs]
        slips = [name for name in epochs if name not in self.tasks and get_close_matches(name, without)]
        if epochs and not any(name in self.tasks for name in epochs):
            slips = list(epochs)
        for name in [*(n for n in self.cfg.optimizer_of if n not in self.tasks), *slips]:
            raise InputError(f"{name!r} is no task of this run{suggestion(name, self.tasks)}")

    def _check_shares(self) -> None:
        """Processes that train together wait for each other at every micro-batch: they need equally many."""
        if self.place.strategy == "auto":
            return
        share = max(1, self.training.batch_size // (len(self.tasks) if self.cfg.joint else 1))
        accumulate = self.training.accumulate
        if share < self.processes or (accumulate > 1 and share % (self.processes * accumulate)):
            raise InputError(
                f"trainer={self.place.strategy}: {share} samples of a task in a batch cannot be shared by "
                f"{self.processes} processes in training.accumulate={accumulate} micro-batches each: make "
                f"training.batch_size a multiple of {self.processes * accumulate} for each task in a batch "
                "(the joint model has all tasks in it)"
            )
        if accumulate > 1 and self.plain["backbone"].get("packing"):
            raise InputError(
                "backbone.packing gives processes different numbers of rows, which "
                f"training.accumulate={accumulate} would cut into different numbers of micro-batches: set it "
                "to 1, or backbone.packing=false"
            )

    def _kept(self, made: Any) -> Any:
        """A task or backbone that keeps what it makes gets the store for it."""
        return made.with_keeper(self._keep) if hasattr(made, "with_keeper") else made

    def _keep(self, kind: str, content: Mapping[str, Any], size: int, make: Any) -> Path:
        """The folder of what tasks and backbones keep; `Keeper`.

        Its files are compared with their hashes, but for decoded images, of which there may be many gigabytes.
        """
        found = self.store.find(kind, content)
        if found is None and kind == "images":
            self._make_room(size)
        found = found or self.store.obtain(kind, content, lambda place: make(place.out))
        for name in found.files if kind != "images" else ():
            found.file(name)
        return found.folder

    def _make_room(self, size: int) -> None:
        """Say how large decoded images will be, and refuse what is beyond the limit or the disk."""
        folder = self.store.root / "images"
        held = sum(file.stat().st_size for file in folder.glob("*/images.u8"))
        place = next(p for p in (folder, *folder.parents) if p.is_dir())
        free, limit = shutil.disk_usage(place).free, self.cfg.images_limit_gb * 1e9
        log.info("decoding into the store: %.2f GB, beside %.2f GB of images there", size / 1e9, held / 1e9)
        if held + size > limit or size > free:
            raise InputError(
                f"decoded images would take {size / 1e9:.1f} GB beside {held / 1e9:.1f} GB in {folder}; "
                f"allowed are {limit / 1e9:g} GB (images_limit_gb), and {free / 1e9:.1f} GB of the disk are "
                "free: delete that folder, raise the limit or set store.root=PATH"
            )

    def _mergers(self) -> dict[str, Merger]:
        nodes = dict(self.cfg.mergers)
        if self.cfg.merger is not None:
            nodes = {self.choices.get("merger") or "merger": self.cfg.merger}
        found = {label: self._merger(label, node) for label, node in nodes.items()}
        known = {name for merger in found.values() for name in merger.content} | _METHOD_FIELDS
        for name in self.search.fields or {}:
            if found and name not in known:
                raise InputError(f"search.fields.{name}: no merging method has it{suggestion(name, known)}")
        return found

    def _merger(self, label: str, node: DictConfig) -> Merger:
        plain: Any = OmegaConf.to_container(node, resolve=True)
        content, open_coefficient = without_null_coefficient(plain)
        method = build(content)
        if not isinstance(method, Method):
            raise InputError(f"mergers.{label} is a {type(method).__name__}, not a merging method")
        method.check(tuple(self.tasks))
        searched = open_coefficient and bool(self.search.coefficients)
        for fields in self.search.variants(content) if searched else ():
            build({**content, **fields}).check(tuple(self.tasks))
        return Merger(label, method, content, searched)

    @cached_property
    def backbone_content(self) -> dict[str, str]:
        return dict(self.backbone.identity())

    def fingerprint(self, task: str) -> str:
        return self.tasks[task].fingerprint()

    def _training_content(self, settings: Settings, optimizer: Mapping[str, Any]) -> dict[str, Any]:
        content = {
            "backbone": self.backbone_content,
            "finetuning": self.plain["finetuning"],
            "optimizer": optimizer,
            "training": settings.content(),
            "seed": self.seed,
        }
        if any(optimizer.get(name) is value for name, value in _OF_PROCESSES.items()) and self.processes > 1:
            content["processes"] = self.processes
        if settings.seconds is not None:
            content["machine"] = machine(self.plain["trainer"]["accelerator"])
        return content

    def _for_task(self, task: str) -> dict[str, Any]:
        return {"task": task, "data": self.fingerprint(task)} | self._learning([task])

    def _learning(self, tasks: Iterable[str]) -> dict[str, Any]:
        """How the backbone learns these tasks, where there is more than one way.

        Scoring is part of it only where validation chooses the weights that are kept.
        """
        found: dict[str, Any] = {}
        for task in tasks:
            how = self.backbone.learning(self.tasks[task])
            if self.training.keep == "best":
                how = how | self.scoring(task)
            if how:
                found[task] = how
        return {"learning": found} if found else {}

    def scoring(self, task: str) -> dict[str, Any]:
        """What decides a score beside model and data, where there is more than one way."""
        how = self.backbone.scoring(self.tasks[task])
        return {"scoring": how} if how else {}

    def settings_of(self, task: str, optimizer: DictConfig | None = None) -> Settings:
        """A task's planned settings, with its optimizer or another."""
        given = self.training
        if given.epochs is not None or given.epochs_of:
            given = given.for_task(task, self.tasks[task].count("train"))
        return given.planned(evaluations_a_step(optimizer or self.optimizer_of(task)))

    def optimizer_of(self, task: str) -> DictConfig:
        """The configuration of the optimizer that trains a task's expert."""
        return self.cfg.optimizer_of.get(task, self.cfg.optimizer)

    @property
    def optimizer_name(self) -> str:
        """What records call the optimizer: its option, its base unless AdamW, and those of single tasks."""
        base = self.choices.get("optimizer@optimizer.base", "adamw")
        name = self.choices["optimizer"] + (f" over {base}" if base != "adamw" else "")
        own = [f"{self.choices.get(f'optimizer@optimizer_of.{t}', 'other')} {t}" for t in self.cfg.optimizer_of]
        return ", ".join([name, *own])

    def expert_source(self, task: str) -> str | None:
        """Where the expert of a task comes from, if it is not trained."""
        given = self.plain["experts"]
        return expert_source(given, self.backbone, self.tasks[task]) if given else None

    def expert_content(self, task: str) -> dict[str, Any]:
        """What names an expert; all that is made of it asks for this."""
        if task not in self._experts:
            self._experts[task] = self._expert_content(task)
        return self._experts[task]

    @cached_property
    def _experts(self) -> dict[str, dict[str, Any]]:
        return {}

    def _expert_content(self, task: str) -> dict[str, Any]:
        if source := self.expert_source(task):
            imported = imported_content(source, self.backbone_content, task)
            return imported | {"finetuning": self.plain["finetuning"]} | self._for_task(task)
        optimizer = self.plain["optimizer_of"].get(task) or self.optimizer_content
        return self._training_content(self.settings_of(task), optimizer) | self._for_task(task)

    @cached_property
    def optimizer_content(self) -> dict[str, Any]:
        """The optimizer's configuration as it enters keys; with what its offsets are fitted to, if they are."""
        given: dict[str, Any] = self.plain["optimizer"]
        if not wants_fit(self.cfg.optimizer):
            return given
        return given | {"pilots": {task: content_key(self.pilot_content(task)) for task in self.tasks}}

    def pilot_settings(self, task: str) -> Settings:
        return self.settings_of(task, self.cfg.optimizer.base)

    def pilot_content(self, task: str) -> dict[str, Any]:
        """The expert that the base optimizer alone makes; offsets are fitted to those of all tasks."""
        return self._training_content(
            self.pilot_settings(task), self.plain["optimizer"]["base"]
        ) | self._for_task(task)

    def fit_content(self) -> dict[str, Any]:
        return {name: self.optimizer_content[name] for name in ("distribution", "pilots")}

    @property
    def joint_settings(self) -> Settings:
        """The budget of all experts together."""
        return Settings.together([self.settings_of(task, self.cfg.optimizer) for task in self.tasks])

    def joint_content(self) -> dict[str, Any]:
        data = {task: self.fingerprint(task) for task in self.tasks}
        content = self._training_content(self.joint_settings, self.optimizer_content)
        return content | {"tasks": list(data), "data": data} | self._learning(data)

    def side_content(self, kind: str, task: str) -> dict[str, Any]:
        """What names an expert's Fisher or Grams."""
        read = ("samples", "fraction", "sampled") if kind == "fisher" else ("samples", "fraction")
        given = self.plain["curvature"]
        curvature = {name: given[name] for name in read if given[name] is not None}
        if kind == "fisher" and given["estimate"] != "per_sample":
            curvature |= {"estimate": given["estimate"], "batch_size": self.training.batch_size}
        if kind == "gram":
            curvature["rows"] = "unpadded"
        return {"expert": content_key(self.expert_content(task)), "curvature": curvature, "seed": self.seed}

    def merge_content(self, merger: Merger, method: Mapping[str, Any]) -> dict[str, Any]:
        experts = {task: content_key(self.expert_content(task)) for task in self.tasks}
        content = {
            "base": self.backbone_content,
            "finetuning": self.plain["finetuning"],
            "order": list(experts),
            "experts": experts,
            "method": method,
        }
        for kind in merger.method.side_inputs:
            content[f"{kind}s"] = {task: content_key(self.side_content(kind, task)) for task in self.tasks}
        return content

    def search_content(self, merger: Merger) -> dict[str, Any]:
        data = {task: self.fingerprint(task) for task in self.tasks}
        content = self.merge_content(merger, merger.content)
        scoring = {task: how for task in data if (how := self.scoring(task))}
        variants = self.search.variants(merger.content)
        searched = {"fields": variants} if variants != [{}] else {}
        return content | {"data": data} | self.search.content() | searched | scoring


def devices_of(device: object) -> list[str]:
    """The devices that a configuration names, `auto` resolved."""
    if device != []:
        device = device_names(device)
    if isinstance(device, list):
        if not device:
            raise InputError("device is an empty list")
        return [str(resolve_device(one)) for one in device]
    if device == "auto":
        return [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    return [str(device)]
