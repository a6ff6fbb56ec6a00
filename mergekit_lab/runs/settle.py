"""What a command line says in short, written out: whose base, whose experts, whose texts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from mergekit_lab.errors import InputError, listing, suggestion

_WEIGHTS = ("source", "weights")
"""Keys by which backbones call their pretrained weights."""
_CHOOSES = "TextEncoder"
"""The backbone whose tasks have choices."""


def settle(cfg: DictConfig) -> DictConfig:
    """The configuration with `base`, `texts` and `experts` in their places; a settled one stays as it is.

    `base` becomes the backbone's `source` or `weights`. `texts`, a list of files or `{name: FILE}`, become the
    suite's tasks; for a text encoder their answers are the choices. `experts`, a list in the suite's order,
    `{task: path}` or `@list.txt`, become `{task: path}`.

    Raises:
        InputError: a backbone whose weights nobody named, or that takes none, a file that is not there, or
            experts that are not one a task, or none where an experiment asks for them.
    """
    if cfg.get("experts") == "":  # of an experiment that has nothing else to work on
        raise InputError("experts is not set: experts=[A,B], in the order of the tasks, or {task: A}")
    if cfg.get("base") is None and cfg.backbone.get("source", "") is None:
        raise InputError("base is not set: base=<folder or hub id>, the backbone's pretrained weights")
    if cfg.get("base") is None and cfg.get("texts") is None and not _is_listed(cfg.get("experts")):
        return cfg
    made = deepcopy(cfg)
    with open_dict(made):
        if made.base is not None:
            key = next((name for name in _WEIGHTS if name in made.backbone), None)
            if key is None:
                raise InputError("base is set, and this backbone takes no weights: choose backbone=hf_causal")
            made.backbone[key] = made.base
        if made.texts is not None:
            made.suite = {
                "name": "texts",
                "tasks": _read_texts(OmegaConf.to_container(made.texts, resolve=True)),
            }
            if made.backbone._target_.endswith(_CHOOSES):
                made.suite.tasks = {name: _add_choices(task) for name, task in made.suite.tasks.items()}
        if _is_listed(made.experts):
            experts = (
                OmegaConf.to_container(made.experts) if OmegaConf.is_config(made.experts) else made.experts
            )
            made.experts = _name_experts(experts, list(made.suite.tasks))
        made.base = made.texts = None
    return made


def _is_listed(experts: Any) -> bool:
    return OmegaConf.is_list(experts) or OmegaConf.is_dict(experts) or str(experts).startswith("@")


def _name_experts(experts: Any, tasks: list[str]) -> dict[str, str]:
    from mergekit_lab.commands.sources import read_sources

    read = read_sources(experts, "experts")
    if isinstance(read, Mapping):
        if odd := [name for name in read if name not in tasks]:
            raise InputError(f"experts names {odd[0]!r}, which is no task{suggestion(odd[0], tasks)}")
        return dict(read)
    if len(read) != len(tasks):
        raise InputError(
            f"{len(read)} experts were given for {len(tasks)} tasks ({listing(tasks)}): one each, in this "
            "order; suite=NAME or texts=[FILE,…] says which tasks"
        )
    return dict(zip(tasks, read, strict=True))


def _read_texts(texts: Any) -> dict[str, dict[str, Any]]:
    if isinstance(texts, list) and texts:
        texts = {Path(str(file)).stem: file for file in texts}
    if not isinstance(texts, Mapping) or not texts:
        raise InputError("texts must be a list of files, [a.csv,b.csv], or a mapping, {a: a.csv}")
    return {str(name): _read_text(str(name), text) for name, text in texts.items()}


def _read_text(name: str, text: Any) -> dict[str, Any]:
    """A task of a file with the columns `prompt` and `answer`, or of the given fields of `TextFile`."""
    fields = dict(text) if isinstance(text, Mapping) else {"source": text}
    source = str(fields.get("source", ""))
    path = Path(source).expanduser()
    if not source.startswith("hub:") and not path.exists():
        raise InputError(f"texts.{name}: {source} does not exist")
    if path.exists():
        fields["source"] = str(path.absolute())
    return {"_target_": "mergekit_lab.tasks.TextFile", "name": name} | fields


def _add_choices(text: Mapping[str, Any]) -> dict[str, Any]:
    """The same task, whose choices are the answers that it has, unless it names them."""
    from mergekit_lab.tasks import PARTS, TextFile

    fields = {str(name): value for name, value in text.items() if name != "_target_"}
    if fields.get("choices") is None:
        task = TextFile(**fields)
        fields["choices"] = sorted({answer for part in PARTS for answer in task.samples(part).answers})
    return {"_target_": text["_target_"]} | fields
