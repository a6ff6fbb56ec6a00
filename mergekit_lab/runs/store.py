"""Stage store: list, verify, explain, prune, export and import what the store holds. Runs alone."""

from __future__ import annotations

import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from mergekit_lab.errors import InputError, say_bytes
from mergekit_lab.paths import find_default_store
from mergekit_lab.reporting import strip_controls
from mergekit_lab.schema.check import build, check_group
from mergekit_lab.schema.store import StoreSettings
from mergekit_lab.store import Artifact, Store
from mergekit_lab.store.artifact import MANIFEST
from mergekit_lab.store.upkeep import (
    adopt,
    find_damages,
    find_half_made,
    find_nearest,
    find_unreadable,
    is_older,
    measure_size,
    remove,
)

if TYPE_CHECKING:
    from mergekit_lab.runs.run import Run

log = logging.getLogger(__name__)
_SHORT = 12
_OF_DATA = ("images", "indices", "heads")
"""Kinds that depend on data or class names alone. All runs share them."""


def run_store(cfg: DictConfig, folder: Path, choices: Mapping[str, str], overrides: Sequence[str]) -> None:
    """Carry out `store.action`.

    Raises:
        InputError: a setting that the action needs is missing or wrong, or `verify` found damage.
    """
    plain: Any = OmegaConf.to_container(cfg.store, resolve=True)
    check_group(plain, StoreSettings, ("store",))
    settings = StoreSettings(**plain)
    store = Store(Path(settings.root).expanduser() if settings.root else find_default_store())
    if cfg.dry_run and settings.action in ("export", "import"):
        log.info("dry_run: store.action=%s does nothing with %s", settings.action, _read_path(settings))
    elif settings.action in _OF_RUNS:
        from mergekit_lab.runs.run import Run
        from mergekit_lab.runs.settle import settle
        from mergekit_lab.schema.run import check, with_chosen_merger

        run = Run(with_chosen_merger(check(settle(cfg)), overrides), folder, choices)
        _OF_RUNS[settings.action](run, settings)
    else:
        _OF_STORES[settings.action](store, settings, cfg)


def _select(store: Store, settings: StoreSettings, others: Sequence[Artifact] = ()) -> list[Artifact]:
    """The published artifacts, and `others`, that `store.kind`, `store.key` and `store.older_than` select."""
    artifacts = [a for a in (*store.list_artifacts(), *others) if settings.kind in (None, a.kind)]
    if settings.key is not None:
        artifacts = [a for a in artifacts if a.key.startswith(settings.key)]
        if not artifacts:
            raise InputError(f"nothing in the store {store.root} has a key that begins with {settings.key!r}")
    if settings.older_than is not None:
        artifacts = [a for a in artifacts if is_older(a, settings.older_than)]
    return artifacts


def _list(store: Store, settings: StoreSettings, cfg: DictConfig) -> None:
    cut = list(find_half_made(store))
    by_kind: dict[str, list[Artifact]] = defaultdict(list)
    for artifact in _select(store, settings, cut):
        by_kind[f"{artifact.kind}{', half made' if artifact in cut else ''}"].append(artifact)
    log.info("store %s", store.root)
    for kind, members in by_kind.items():
        log.info("%s: %d, %s", kind, len(members), say_bytes(sum(map(measure_size, members))))
        if settings.kind or settings.key:
            for artifact in members:
                size = say_bytes(measure_size(artifact))
                columns = (artifact.key, artifact.created, size, _describe(artifact))
                log.info("  %s", strip_controls("  ".join(columns)))
    if not by_kind:
        log.info("nothing")


def _describe(artifact: Artifact) -> str:
    content = artifact.content
    words = [str(content[name]) for name in ("task", "part", "metric") if name in content]
    built = [content[n] for n in ("optimizer", "method") if isinstance(content.get(n), Mapping)]
    words += [str(node.get("_target_", "")).rpartition(".")[2] for node in built]
    words += [f"{name} {content[name]}" for name in ("coefficient", "seed") if name in content]
    return ", ".join(words)


def _verify(store: Store, settings: StoreSettings, cfg: DictConfig) -> None:
    """Report damaged artifacts; remove them with `store.confirm=true`."""
    chosen = _select(store, settings, list(find_unreadable(store)))
    wrong = find_damages(chosen)
    folders = list(dict.fromkeys(damage.folder for damage in wrong))
    messages = "\n".join(damage.message for damage in wrong)
    if not wrong:
        log.info("%d artifacts in the store %s are intact", len(chosen), store.root)
    elif cfg.dry_run or not settings.confirm:
        raise InputError(
            f"{len(folders)} artifacts in the store {store.root} are damaged: store.confirm=true removes "
            f"them, and a run that needs them makes them again:\n{messages}"
        )
    else:
        for folder in folders:
            remove(store, folder)
        log.info("removed %d damaged artifacts, of %d:\n%s", len(folders), len(chosen), messages)


def _explain(run: Run, settings: StoreSettings) -> None:
    """For each missing artifact of this run, log the most similar stored one and where they differ."""
    from mergekit_lab.runs.graph import list_nodes

    missing = [node for node in list_nodes(run) if settings.kind in (None, node.kind) and not run.find(node)]
    if not missing:
        log.info("everything that this run needs is in the store %s", run.store.root)
    for node in [node for node in missing if node.kind == missing[0].kind]:  # later kinds depend on these
        near = find_nearest(run.store, node.kind, node.content)
        what = f"{node.kind} {node.key[:_SHORT]} ({node.content.get('task', 'all tasks')})"
        if near is None:
            log.info("%s: the store has no %s", what, node.kind)
            continue
        artifact, parts = near
        if not parts:
            log.info("%s: %s has the same content, but another version's schema", what,
                     artifact.key[:_SHORT])  # fmt: skip
            continue
        part = parts[0]
        more = f", and {len(parts) - 1} more" if len(parts) > 1 else ""
        log.info("%s: the nearest is %s, but %s is %r and there %r%s", what, artifact.key[:_SHORT], part.path,
                 part.wanted, part.stored, more)  # fmt: skip


def _prune(run: Run, settings: StoreSettings) -> None:
    from mergekit_lab.runs.graph import list_nodes

    names = {(node.kind, node.key) for node in list_nodes(run)}
    chosen = [
        artifact
        for artifact in _select(run.store, settings, list(find_half_made(run.store)))
        if settings.which == "all" or ((artifact.kind, artifact.key) in names) == (settings.which == "run")
    ]
    if settings.which == "others" and settings.kind is None:
        chosen = [artifact for artifact in chosen if artifact.kind not in _OF_DATA]
    freed = say_bytes(sum(map(measure_size, chosen)))
    if not settings.confirm or run.cfg.dry_run:
        for artifact in chosen:
            log.info("%s %s  %s", artifact.kind, artifact.key, _describe(artifact) or "half made")
        way_on = "set store.confirm=true to remove them" if chosen else "there is nothing to remove"
        log.info("%d artifacts, %s: %s", len(chosen), freed, way_on)
        return
    for artifact in chosen:
        remove(run.store, artifact.folder)
    log.info("removed %d artifacts, %s", len(chosen), freed)


def _read_path(settings: StoreSettings) -> Path:
    if settings.path is None:
        raise InputError(f"store.action={settings.action} needs store.path=FOLDER")
    return Path(settings.path).expanduser()


def _export(store: Store, settings: StoreSettings, cfg: DictConfig) -> None:
    """Export one artifact as a folder: its files, a model card, and the manifest by which it can be imported.

    If the configuration names the artifact's backbone, the files that a library needs to load it are added.
    """
    from mergekit_lab.checkpoints import check_push, make_folder, push_folder

    check_push(settings.push_to)
    out = _read_path(settings)
    chosen = _select(store, settings) if settings.key else []
    if len(chosen) != 1:
        raise InputError(
            f"store.key={settings.key} fits {len(chosen)} artifacts, but one is needed: see store.action=list"
        )
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(f"{out} is not an empty folder: export into a new one")
    artifact = chosen[0]
    files = {name: artifact.find_file(name) for name in artifact.files} | {MANIFEST: artifact.folder / MANIFEST}
    with make_folder(out, planned={name: file.stat().st_size for name, file in files.items()}) as folder:
        companions = _list_companions(cfg, artifact, folder)
        for name, file in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
        results = _read_results(store, artifact)
        (folder / "README.md").write_text(make_card(artifact, bool(companions), out.name, results))
    log.info("%s %s is in %s%s", artifact.kind, artifact.key, out,
             f", with {', '.join(companions)}" if companions else "")  # fmt: skip
    if settings.push_to is not None:
        push_folder(out, settings.push_to, settings.push_private, ignore=["manifest.json"])  # it may name paths


def _import(store: Store, settings: StoreSettings, cfg: DictConfig) -> None:
    artifact = adopt(store, _read_path(settings))
    log.info("%s %s: %s", artifact.kind, artifact.key, "was there" if artifact.reused else "imported")


def _read_results(store: Store, artifact: Artifact) -> dict[str, float]:
    """The stored scores of a model on test parts, by `task/metric`."""
    return {
        f"{each.content['task']}/{metric}": value
        for each in store.list_artifacts()
        if each.kind == "evaluations"
        and each.content.get("model") == artifact.key
        and each.content.get("part") == "test"
        for metric, value in each.info.get("metrics", {}).items()
    }


def _list_companions(cfg: DictConfig, artifact: Artifact, folder: Path) -> list[str]:
    made_of = artifact.content.get("backbone") or artifact.content.get("base")
    if "model.safetensors" not in artifact.files or not made_of:
        return []
    from mergekit_lab.backbones import Backbone

    backbone = build(cfg.backbone, Backbone)
    try:
        if backbone.identify().items() <= made_of.items():
            return backbone.write_companions(folder)
    except InputError as error:
        log.warning("%s", error)
    log.warning(
        "its backbone is not this configuration's: add the run's own options (+experiment=NAME, "
        "backbone=NAME) to export configuration and tokenizer too"
    )
    return []


def make_card(artifact: Artifact, is_whole: bool, title: str, results: Mapping[str, float]) -> str:
    """The README of an exported model, with the hub's metadata."""
    content = json.dumps(artifact.content, indent=1, ensure_ascii=False)
    from mergekit_lab.checkpoints import escape_markdown, write_results

    library = "transformers" if is_whole else "mergekit_lab"
    index = write_results(title, results) if results else ""
    return (
        f"---\nlibrary_name: {library}\ntags: [mergekit_lab]\n{index}---\n"
        f"# {escape_markdown(f'{artifact.kind}: {_describe(artifact)}')}\n\n"
        f"Made {artifact.created} by mergekit_lab; named {artifact.key} by the hash of what decides it:\n\n"
        f"```json\n{content}\n```\n"
    )


_OF_STORES = {"list": _list, "verify": _verify, "export": _export, "import": _import}
_OF_RUNS = {"explain": _explain, "prune": _prune}
"""Functions by action: those that only need a store, and those that need the composed run."""
