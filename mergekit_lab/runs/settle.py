"""Expand the short forms of a command line: `base`, `texts`, `experts`, `models`, `suite.lm_eval_tasks`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from mergekit_lab.errors import InputError, join_names, suggest

_WEIGHTS = ("source", "weights")
"""Names that backbones' configurations have for the pretrained weights."""
_CHOOSES = "TextEncoder"
"""The backbone whose tasks need choices."""


def settle(cfg: DictConfig) -> DictConfig:
    """The configuration with its short forms expanded. An expanded configuration is returned as it is.

    - `base` becomes the backbone's `source` or `weights`.
    - `texts`, a list of files or `{name: FILE}`, become the suite's tasks. For a text encoder, their answers
      become the choices.
    - `suite.lm_eval_tasks` become tasks of lm-evaluation-harness, besides the texts.
    - `experts`, a list in the order of the learned tasks, `{task: path}` or `@list.txt`, become
      `{task: path}`. If nothing is learned, they keep their own names or those of their folders.
    - `models` become `{name: path}` in the same way.

    Raises:
        InputError: the backbone needs a base and none is set, or it takes none; a file does not exist; experts
            are missing, or are not one for each task; settings name a task that the suite lacks.
    """
    if cfg.get("experts") == "":  # set by experiments that only evaluate experts
        raise InputError("experts is not set: experts=[A,B], in the order of the tasks, or {task: A}")
    if cfg.get("base") is None and cfg.get("models") is None and cfg.backbone.get("source", "") is None:
        raise InputError("base is not set: base=<folder or hub id>, the backbone's pretrained weights")
    if (
        cfg.get("base") is None
        and cfg.get("texts") is None
        and not any(_is_listed(cfg.get(key)) for key in ("experts", "models"))
        and "lm_eval_tasks" not in cfg.get("suite", ())
    ):
        return cfg
    settled = deepcopy(cfg)
    with open_dict(settled):
        if settled.base is not None:
            settled.backbone[find_weights_key(settled.backbone)] = settled.base
        texts = (
            {} if settled.texts is None else _read_texts(OmegaConf.to_container(settled.texts, resolve=True))
        )
        scored: dict[str, Any] = {}
        if "lm_eval_tasks" in settled.suite:
            suite: Any = OmegaConf.to_container(settled.suite, resolve=True)
            scored = _list_harness_tasks(suite)
            settled.suite = {"name": suite["name"], "tasks": suite["tasks"] | scored}
        if texts and settled.backbone._target_.endswith(_CHOOSES):
            texts = {name: _add_choices(task) for name, task in texts.items()}
        if texts:
            settled.suite = {"name": settled.suite.name if scored else "texts", "tasks": texts | scored}
        for key in ("experts", "models"):
            if _is_listed(settled[key]):
                sources: Any = settled[key]
                sources = OmegaConf.to_container(sources) if OmegaConf.is_config(sources) else sources
                settled[key] = _name_checkpoints(sources, key, settled.suite.tasks)
        if settled.models and settled.backbone[find_weights_key(settled.backbone)] is None:
            settled.backbone[find_weights_key(settled.backbone)] = next(iter(settled.models.values()))
        settled.base = settled.texts = None
    return settled


def find_weights_key(backbone: Any) -> str:
    """The key of the pretrained weights in a backbone's configuration.

    Raises:
        InputError: this backbone takes no weights.
    """
    key = next((name for name in _WEIGHTS if name in backbone), None)
    if key is None:
        raise InputError("base or models is set, but this backbone takes no weights: choose backbone=hf_causal")
    return key


def _list_harness_tasks(suite: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A configuration for each of `lm_eval_tasks`. A setting has one value, or a mapping from task to value."""
    listed = suite["lm_eval_tasks"]
    names = [listed] if isinstance(listed, str) else list(map(str, listed or ()))
    if not names:
        raise InputError("suite.lm_eval_tasks is empty: name tasks of lm-evaluation-harness, [gsm8k,arc_easy]")
    nodes: dict[str, dict[str, Any]] = {
        name: {"_target_": "mergekit_lab.tasks.HarnessTask", "name": name} for name in names
    }
    for key, value in suite.items():
        if key in ("name", "tasks", "lm_eval_tasks") or value is None:
            continue
        of_tasks = value if isinstance(value, Mapping) else dict.fromkeys(names, value)
        for name, own in of_tasks.items():
            if name not in nodes:
                raise InputError(f"suite.{key} names {name!r}, which is not a task{suggest(name, names)}")
            nodes[name][key] = own
    return nodes


def _is_listed(experts: Any) -> bool:
    return OmegaConf.is_config(experts) or str(experts).startswith("@")


def _name_checkpoints(sources: Any, key: str, tasks: Mapping[str, Any]) -> dict[str, str]:
    """Experts by the learned tasks. If there are none, checkpoints by their own names or their folders'."""
    from mergekit_lab.commands.sources import name_by_folder, read_sources

    read = read_sources(sources, key)
    learned = [name for name, task in tasks.items() if not str(task.get("_target_")).endswith("HarnessTask")]
    if key == "models" or not learned:
        return name_by_folder(read, key)
    if isinstance(read, Mapping):
        if odd := [name for name in read if name not in learned]:
            raise InputError(f"experts names {odd[0]!r}, which is not a task{suggest(odd[0], learned)}")
        return dict(read)
    if len(read) != len(learned):
        raise InputError(
            f"{len(read)} experts were given for {len(learned)} tasks ({join_names(learned)}): one each, in "
            "this order; suite=NAME or texts=[FILE,…] says which tasks"
        )
    return dict(zip(learned, read, strict=True))


def _read_texts(texts: Any) -> dict[str, dict[str, Any]]:
    if isinstance(texts, list) and texts:
        stems = [Path(str(file)).stem for file in texts]
        if doubled := {stem for stem in stems if stems.count(stem) > 1}:
            raise InputError(
                f"texts has several files of the name {join_names(doubled)}: name the tasks, {{NAME: FILE, …}}"
            )
        texts = dict(zip(stems, texts, strict=True))
    if not isinstance(texts, Mapping) or not texts:
        raise InputError("texts must be a list of files, [a.csv,b.csv], or a mapping, {a: a.csv}")
    return {str(name): _read_text(str(name), text) for name, text in texts.items()}


def _read_text(name: str, text: Any) -> dict[str, Any]:
    """A `TextFile` task of a file with the columns `prompt` and `answer`, or of given fields."""
    fields = dict(text) if isinstance(text, Mapping) else {"source": text}
    source = str(fields.get("source", ""))
    path = Path(source).expanduser()
    if not source.startswith("hub:") and not path.exists():
        raise InputError(f"texts.{name}: {source} does not exist")
    if path.exists():
        fields["source"] = str(path.absolute())
    return {"_target_": "mergekit_lab.tasks.TextFile", "name": name} | fields


def _add_choices(text: Mapping[str, Any]) -> dict[str, Any]:
    """The same task with its answers as choices, unless it has choices."""
    from mergekit_lab.tasks import PARTS, TextFile

    fields = {str(name): value for name, value in text.items() if name != "_target_"}
    if fields.get("choices") is None:
        task = TextFile(**fields)
        fields["choices"] = sorted({answer for part in PARTS for answer in task.load_samples(part).answers})
    return {"_target_": text["_target_"]} | fields
