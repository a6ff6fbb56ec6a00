"""Find experts that others fine-tuned, and import them into the store.

- `experts={task: SOURCE}` names each.
- `experts=hub:ORG` takes `ORG/<backbone>_<task>` from the hub, the names under which FusionBench publishes.
- `experts=FOLDER` takes `FOLDER/<architecture>/<task>` or else `FOLDER/<task>`, a folder or a file; or a file
  as task arithmetic and its successors lay them out, `FOLDER/ViT-B-32/CarsVal/finetuned.pt`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergekit_lab.backbones import OpenClip, as_image_tower
from mergekit_lab.checkpoints import (
    Checkpoint,
    align,
    find_cached_snapshot,
    hash_file,
    list_deciding_files,
    open_checkpoint,
    parse_hub_id,
    write_tensors,
)
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.tasks import HubImages, Task
from mergekit_lab.tasks.labels import simplify

_SUFFIXES = ("", ".safetensors", ".pt", ".pth", ".bin")
_FINETUNED = ("nonlinear_finetuned.pt", "finetuned.pt")
HUB = "hub:"


def find_expert(experts: str | Mapping[str, str], backbone: Any, task: Task) -> str:
    """The source of a task's expert for `open_checkpoint`: a hub id or a path.

    Raises:
        InputError: no expert is given for the task, or none is found under a known name.
    """
    if isinstance(experts, Mapping):
        if task.name not in experts:
            raise InputError(f"experts names {join_names(experts)}, but none for the task {task.name!r}")
        return experts[task.name]
    if experts.startswith(HUB):
        expert = getattr(task, "expert", None)
        if not isinstance(backbone, OpenClip) or expert is None:
            raise InputError(
                f"no expert of {task.name!r} is known on the hub for this backbone: give "
                f"experts={{{task.name}: SOURCE, …}}"
            )
        return f"{experts.removeprefix(HUB)}/{backbone.name_on_hub()}_{expert}"
    folder = Path(experts).expanduser()
    if not folder.is_dir():
        raise InputError(f"experts={experts}: there is no such folder; for the hub's, write hub:ORG")
    names = [task.name, *([task.expert] if isinstance(task, HubImages) and task.expert else [])]
    inside = locate_experts(folder, backbone)
    plain = folder / inside.relative_to(folder).name.removesuffix("-quickgelu")
    folders = list(dict.fromkeys((inside, plain, folder)))
    for path in (within / f"{name}{suffix}" for within in folders for name in names for suffix in _SUFFIXES):
        if path.exists():
            return str(_find_finetuned(path) or path)
    for path in (path for within in folders if within.is_dir() for path in sorted(within.iterdir())):
        if simplify(path.name).removesuffix("val") in map(simplify, names) and (file := _find_finetuned(path)):
            return str(file)
    raise InputError(
        f"{folder} holds no expert of {task.name!r}: expected {folder / names[0]}, a folder or a file"
    )


def _find_finetuned(folder: Path) -> Path | None:
    return next((folder / name for name in _FINETUNED if (folder / name).is_file()), None)


def locate_experts(root: Path, backbone: Any) -> Path:
    """The subfolder of one backbone's experts in a folder with those of several."""
    return root / backbone.architecture if isinstance(backbone, OpenClip) else root


def parse_expert_id(source: str) -> tuple[str, str | None] | None:
    """The repository and revision of an expert on the hub; None for a local path.

    Raises:
        InputError: it is neither an existing path nor a hub id.
    """
    if Path(source).expanduser().exists():
        return None
    named = parse_hub_id(source)
    if named is None:
        raise InputError(
            f"the expert {source} is neither a path that exists nor a hub id (org/name, org/name@revision)"
        )
    return named


def must_download(source: str) -> bool:
    """Whether an expert must be downloaded first. Raises as `parse_expert_id` does."""
    named = parse_expert_id(source)
    return named is not None and find_cached_snapshot(*named) is None


def read_import_content(source: str, backbone: Mapping[str, Any], task: str) -> dict[str, Any]:
    """What decides an imported expert: the hash of its files, wherever they are, the backbone and the task.

    The caller adds the task's data and head, because the expert's Fisher depends on them.
    """
    files = list_deciding_files(source, f"the expert of {task}" if task else "an expert")
    digests = [hash_file(file) for file in files]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return {"backbone": dict(backbone), "imported": digest, "task": task}


def import_expert(
    source: str, backbone: Any, base: Mapping[str, Any], task: str, out: Path
) -> Mapping[str, Any]:
    """Write an expert under the backbone's names. It is an image tower of CLIP, a whole model or an adapter.

    Raises:
        InputError: it cannot be read, is a pickle of a whole module, or of another architecture.
    """
    if isinstance(backbone, OpenClip):
        opened: Checkpoint = open_checkpoint(source, f"the expert of {task}")
        tensors = as_image_tower(opened, base, opened.label)
    else:
        origin = open_checkpoint(base, "the base")
        aligned = align(origin, open_checkpoint(source, f"the expert of {task}", base=origin))
        if lacking := base.keys() - aligned.keys():
            raise InputError(
                f"the expert of {task}, {source}, lacks {len(lacking)} tensors of the base "
                f"({join_names(lacking, 3)}): was it saved from another model?"
            )
        tensors = {name: aligned[name] for name in base}
    write_tensors(out / "model.safetensors", tensors, sync=False)
    (out / "curve.json").write_text(json.dumps([]))
    return {"source": source}
