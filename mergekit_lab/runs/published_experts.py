"""Experts that others fine-tuned, in place of training: where they are, and how they enter the store.

`experts=hub:ORG` takes `ORG/<backbone>_<task>` from the hub by the names that FusionBench publishes under;
`experts=FOLDER` takes `FOLDER/<architecture>/<task>`, or else `FOLDER/<task>`, a folder or a file, or what task
arithmetic and its successors have at `FOLDER/ViT-B-32/CarsVal/finetuned.pt`; `experts={task: SOURCE}` names
each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.backbones import OpenClip, as_image_tower
from mergekit_lab.checkpoints import (
    Checkpoint,
    find_cached_snapshot,
    hash_file,
    open_checkpoint,
    parse_hub_id,
    write_tensors,
)
from mergekit_lab.errors import InputError, listing
from mergekit_lab.tasks import HubImages, Task

_SUFFIXES = ("", ".safetensors", ".pt", ".pth", ".bin")
_FINETUNED = ("nonlinear_finetuned.pt", "finetuned.pt")
HUB = "hub:"


def expert_source(given: str | Mapping[str, str], backbone: Any, task: Task) -> str:
    """What `open_checkpoint` takes for a task's expert: a hub id or a path.

    Raises:
        InputError: nothing is given for the task, or published under a name that is known.
    """
    if isinstance(given, Mapping):
        if task.name not in given:
            raise InputError(f"experts names {listing(given)}, and none for the task {task.name!r}")
        return given[task.name]
    if given.startswith(HUB):
        expert = getattr(task, "expert", None)
        if not isinstance(backbone, OpenClip) or expert is None:
            raise InputError(
                f"no expert of {task.name!r} is known on the hub for this backbone: give "
                f"experts={{{task.name}: SOURCE, …}}"
            )
        return f"{given.removeprefix(HUB)}/{backbone.hub_name()}_{expert}"
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise InputError(f"experts={given}: there is no such folder; the hub's are hub:ORG")
    names = [task.name, *([task.expert] if isinstance(task, HubImages) and task.expert else [])]
    inside = expert_folder(folder, backbone)
    plain = folder / inside.relative_to(folder).name.removesuffix("-quickgelu")
    places = list(dict.fromkeys((inside, plain, folder)))
    for place in (within / f"{name}{suffix}" for within in places for name in names for suffix in _SUFFIXES):
        if place.exists():
            return str(_finetuned(place) or place)
    for place in (place for within in places if within.is_dir() for place in sorted(within.iterdir())):
        if _plain(place.name).removesuffix("val") in map(_plain, names) and (file := _finetuned(place)):
            return str(file)
    raise InputError(
        f"{folder} holds no expert of {task.name!r}: expected {folder / names[0]}, a folder or a file"
    )


def _finetuned(folder: Path) -> Path | None:
    return next((folder / name for name in _FINETUNED if (folder / name).is_file()), None)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.lower())


def expert_folder(root: Path, backbone: Any) -> Path:
    """Where experts of a backbone are in a folder with those of several."""
    return root / backbone.architecture if isinstance(backbone, OpenClip) else root


def expert_on_hub(source: str) -> tuple[str, str | None] | None:
    """The repository and revision that an expert comes from; None of one that is a local path.

    Raises:
        InputError: there is no such path, and it could be no hub id.
    """
    if Path(source).expanduser().exists():
        return None
    named = parse_hub_id(source)
    if named is None:
        raise InputError(f"the expert {source} is neither there nor a hub id (org/name, org/name@revision)")
    return named


def expert_missing(source: str) -> bool:
    """Whether an expert would have to be downloaded; raises as `expert_on_hub`."""
    named = expert_on_hub(source)
    return named is not None and find_cached_snapshot(*named) is None


def imported_content(source: str, backbone: Mapping[str, str], task: str) -> dict[str, Any]:
    """The bytes that an imported expert comes from, not where they are.

    In the store its data and head name it too: on others its Fisher is another.
    """
    opened = open_checkpoint(source, f"the expert of {task}")
    digests = [hash_file(file, remember=True) for file in opened.files]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return {"backbone": dict(backbone), "imported": digest, "task": task}


def import_expert(source: str, base: Mapping[str, Any], task: str, out: Path) -> Mapping[str, Any]:
    """Write an expert as the backbone's image tower.

    Raises:
        InputError: it cannot be read, is a pickle of a whole module, or of another architecture.
    """
    opened: Checkpoint = open_checkpoint(source, f"the expert of {task}")
    write_tensors(out / "model.safetensors", as_image_tower(opened, base, opened.label))
    (out / "curve.json").write_text(json.dumps([]))
    return {"source": source}
