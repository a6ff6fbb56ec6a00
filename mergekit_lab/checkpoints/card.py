"""The model card of a merged folder, and the same record as JSON for programs.

Neither holds a path of this machine: local inputs are called by their folder's name, and told apart by a
fingerprint of their bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from mergekit_lab.checkpoints.checkpoint import Checkpoint
from mergekit_lab.checkpoints.plain_files import flatten
from mergekit_lab.checkpoints.publish import RECORD
from mergekit_lab.digests import hash_file, is_blob

_HASHED_WHOLE = 32 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 14
SAMPLED = (
    f"*Sampled*: of a file over {_HASHED_WHOLE >> 20} MiB, the SHA-256 of its size and of {_SAMPLES} evenly "
    f"spaced pieces of {_SAMPLE_BYTES >> 10} KiB. It tells trained models apart, not files that differ in a "
    "few bytes."
)


def fingerprint(checkpoint: Checkpoint, label: str | None = None) -> dict[str, Any]:
    """What identifies an input, without reading all of it.

    A file is named by its SHA-256 if that is cheap: up to 32 MiB, or in the hub's cache, whose files are named
    by it. Otherwise by a sampled hash, which may miss a change of a few bytes: see `SAMPLED`.

    Returns:
        `{"label", "tensors", "revision" (of a hub's snapshot), "files": {name: {"bytes", "sha256" or
        "sampled_sha256"}}}`, without `files` for tensors in memory.
    """
    files = {}
    for path in checkpoint.files:
        size = path.stat().st_size
        if size <= _HASHED_WHOLE or is_blob(path):
            files[path.name] = {"bytes": size, "sha256": hash_file(path)}
        else:
            files[path.name] = {"bytes": size, "sampled_sha256": _hash_samples(path, size)}
    layout = [(n, list(s.shape), str(s.dtype)) for n, s in sorted(checkpoint.specs.items())]
    described: dict[str, Any] = {
        "label": label or checkpoint.label,
        "tensors": len(checkpoint),
        "layout_sha256": hashlib.sha256(json.dumps(layout).encode()).hexdigest(),
    }
    if checkpoint.folder is not None and checkpoint.folder.parent.name == "snapshots":
        described["revision"] = checkpoint.folder.name
    return described | ({"files": files} if files else {})


def _hash_samples(path: Path, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@dataclass(frozen=True)
class Card:
    """The model card of a merged model.

    Attributes:
        title: usually the folder's name.
        method: the class's name.
        hyper_parameters: every field of the method, nested methods as mappings.
        base, experts: fingerprints, experts by name.
        settings: what else decided the result (dtype, embeddings, include, …).
        side: fingerprints of side inputs, by kind and expert.
        hub_ids: for the card's header; local inputs are left out.
        notes: sentences on what was done to the inputs.
        metrics: numbers measured on the merged model.
        recipe: a mergekit YAML that asked for it.
        versions: of the programs.
        hub: further fields of the header, as `license`.
        usage: lines of Python that load the model.
        command: merges the same inputs alike.
        equivalent: a mergekit YAML of the same merge, where none asked for it.
    """

    title: str
    method: str
    hyper_parameters: Mapping[str, Any]
    base: Mapping[str, Any]
    experts: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    side: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hub_ids: Sequence[str] = ()
    notes: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    recipe: str | None = None
    hub: Mapping[str, Any] = field(default_factory=dict)
    usage: str = ""
    command: str = ""
    equivalent: str = ""

    def make_files(self) -> dict[str, Path | str]:
        """`README.md` and `mergekit_lab.json`, to be written."""
        record = json.dumps(vars(self), indent=1, default=str) + "\n"
        return {"README.md": self.format_text(), RECORD: record}

    def format_text(self) -> str:
        """The README of the merged folder, with the metadata that the hub reads."""
        head = ["---", *(f"{name}: {json.dumps(value)}" for name, value in self.hub.items())]
        if self.hub_ids:
            head += ["base_model:", *(f"- {json.dumps(name)}" for name in self.hub_ids)]
            head += ["base_model_relation: merge"]
        head += ["tags:", "- merge", "- mergekit_lab"]
        if self.metrics:
            head += write_results(self.title, self.metrics, self.hub.get("pipeline_tag")).splitlines()
        head += ["---", ""]
        preset = self.hyper_parameters.get("preset")
        by = f"**{escape_markdown(self.method)}**" + (f", preset {escape_markdown(preset)}" if preset else "")
        if "merge_method" in self.hyper_parameters:
            by = f"mergekit's **{escape_markdown(self.hyper_parameters['merge_method'])}**"
        body = [f"# {escape_markdown(self.title)}", ""]
        body += [f"{len(self.experts)} experts of one base, merged by {by}.", ""]
        if self.usage:
            body += _write_section("Use", ["```python", *self.usage.splitlines(), "```"])
        body += _write_section("Method", _list_settings(self.hyper_parameters))
        if self.recipe:
            body += ["The mergekit recipe:", "", *_write_fence(self.recipe, "yaml"), ""]
        elif self.command:
            body += ["The command; inputs are named below:", "", *_write_fence(self.command, "sh"), ""]
        if self.equivalent:
            body += ["The same merge as a mergekit recipe:", "", *_write_fence(self.equivalent, "yaml"), ""]
        prints = [("base", self.base), *self.experts.items()]
        prints += [(f"{kind} of {n}", p) for kind, by_name in self.side.items() for n, p in by_name.items()]
        rows = [(name, _name_source(p), _shorten(p)) for name, p in prints]
        body += _write_section("Inputs", _format_table(("input", "source", "fingerprint"), rows))
        if any("sampled_sha256" in file for _, p in prints for file in p.get("files", {}).values()):
            body += [SAMPLED, ""]
        body += _write_section("Settings", _list_settings(self.settings))
        if self.metrics:
            metrics = [(name, f"{value:g}") for name, value in self.metrics.items()]
            body += _write_section("Metrics", _format_table(("metric", "value"), metrics))
        if self.notes:
            body += _write_section("Notes", [f"- {escape_markdown(note)}" for note in self.notes])
        body += [f"Made with {escape_markdown(', '.join(' '.join(pair) for pair in self.versions.items()))}."]
        body += [f"`{RECORD}` has all of this, with full hashes."]
        return "\n".join([*head, *body]) + "\n"


def write_results(title: str, metrics: Mapping[str, float], pipeline: str | None = None) -> str:
    """The field `model-index` of a card's header, in YAML: https://huggingface.co/docs/hub/model-cards#evaluation-results.

    Args:
        metrics: values by `data set/metric`, or by data set alone, whose metric is then a "score".
        pipeline: the hub's name of what the model does.
    """
    results = []
    for name, value in metrics.items():
        data, _, metric = name.partition("/")
        results.append(
            {
                "task": {"type": pipeline or "other"},
                "dataset": {"type": data, "name": data},
                "metrics": [{"type": metric or "score", "value": value}],
            }
        )
    index = {"model-index": [{"name": title, "results": results}]}
    return yaml.safe_dump(index, sort_keys=False, allow_unicode=True)


def _write_fence(text: str, language: str = "") -> list[str]:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}{language}", text.strip(), fence]


def _write_section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""]


def _name_source(print_: Mapping[str, Any]) -> str:
    revision = print_.get("revision")
    return f"{print_['label'].split('@')[0]}@{revision[:12]}" if revision else str(print_["label"])


def _shorten(print_: Mapping[str, Any]) -> str:
    if "files" not in print_:
        return f"{print_['tensors']} tensors in memory, layout {print_['layout_sha256'][:12]}"
    parts = []
    for name, file in print_["files"].items():
        whole = file.get("sha256")
        parts.append(f"{name} {(whole or file['sampled_sha256'])[:12]}{'' if whole else ' (sampled)'}")
    return "\n".join(parts if len(parts) <= 4 else [*parts[:3], f"and {len(parts) - 3} more files"])


def _list_settings(values: Mapping[str, Any]) -> list[str]:
    rows = [(name, "not set" if v is None else str(v)) for name, v in flatten(values).items()]
    return _format_table(("setting", "value"), rows)


def _format_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Cells are any text; the lines of one stay lines."""
    cells = [["<br>".join(map(escape_markdown, cell.split("\n"))) for cell in row] for row in rows]
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in cells),
    ]


_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|^(?=[#+-])")


def escape_markdown(text: object) -> str:
    """Text of others (names, labels, values) as one line that Markdown shows as it is, HTML and all."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    line = _MARKUP.sub(lambda match: f"\\{match.group()}", line)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def read_versions() -> dict[str, str]:
    """Of what decides the numbers."""
    import safetensors

    from mergekit_lab import __version__

    return {"mergekit_lab": __version__, "torch": torch.__version__, "safetensors": safetensors.__version__}
