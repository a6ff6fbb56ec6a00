"""Tracking with Weights & Biases.

A run that cannot go online goes offline, and so do those that its tracker starts later (`wandb sync` uploads
them, and `wandb_link` then says which run used what).
"""

import json
import logging
import netrc
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mergekit_lab.errors import InputError
from mergekit_lab.reporting.records import Record
from mergekit_lab.reporting.tables import Table
from mergekit_lab.reporting.trackers import Product, Start, Tracker, guard

log = logging.getLogger(__name__)
_MODES = ("online", "offline", "disabled")
LINEAGE = "wandb_lineage.jsonl"
"""In a run's folder: what its offline runs made, and of what; a line each."""
_MANIFEST = "manifest.json"
EVALUATIONS = "evaluations"
"""The kind of products that are lines of a table, and no artifacts."""
_TAG = 64
"""Characters that a tag may have."""
_AXES = ("backbone", "suite", "finetuning", "optimizer", "merger", "mergers", "seed")
_INIT_TIMEOUT = 15
"""Seconds that a start waits for the server, unless WANDB_INIT_TIMEOUT says otherwise."""
_SECRET = re.compile(r"(^|[._])(api_key|token|password|secret)$", re.IGNORECASE)


class WandbTracker(Tracker):
    """Logs metrics over `step`, leaderboard and evaluations as tables, figures, and artifacts.

    An artifact holds the manifest of its artifact of the store (content, SHA-256 of every file), by which the
    weights can be found; the key in the store is its alias. Evaluations are lines of a table instead. Offline,
    where wandb links no inputs, these are kept in the run's folder for `wandb_link`.

    Args:
        project: W&B project.
        entity: W&B user or team; None is the account's default.
        mode: "online", "offline", "disabled", or None: online if wandb is configured to be and a key is
            found (environment, netrc or settings file), else offline. Nothing ever prompts for a key.
        weights: upload the files of experts, merged models and the rest besides their manifests.
        resume: go on in the run that the same configuration began, instead of in a new one.

    Offline nothing is sent: wandb's own error reports, which would call its server even then, are
    switched off unless WANDB_ERROR_REPORTING says otherwise. Raises `InputError` for an unknown mode.
    """

    name = "wandb"

    def __init__(
        self,
        project: str = "mergekit_lab",
        entity: str | None = None,
        mode: str | None = None,
        weights: bool = False,
        resume: bool = True,
    ) -> None:
        if mode is not None and mode not in _MODES:
            raise InputError(f"wandb mode {mode!r}: one of {', '.join(_MODES)}, or null")
        self.project, self.entity, self.mode = project, entity, mode
        self.weights, self.resume = weights, resume
        self._folder = Path()
        self._logged: dict[str, Any] = {}
        self._here: set[str] = set()
        self._used: set[str] = set()
        self._unreachable = self._told = False

    def _begin(self, start: Start) -> Any:
        self._folder, self._here, self._used = start.folder, set(), set()
        self._folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode: Any = "offline" if self._unreachable else self._resolve_mode()
        quiet = os.environ.get("WANDB_QUIET", "true").lower() in ("1", "true", "yes")
        if mode == "offline" and quiet and not self._told:
            log.info("W&B is offline; later: wandb sync %s/wandb/offline-run-*", start.folder)
            self._told = True
        arguments: dict[str, Any] = {
            "project": self.project,
            "entity": self.entity,
            "dir": str(start.folder),
            "name": start.name,
            "group": start.group,
            "job_type": start.job_type,
            "config": flatten(start.config),
            "tags": sorted({tag[:_TAG] for tag in start.tags if tag}),
            "id": start.identity if self.resume else None,
            "reinit": "create_new",  # a job that failed must not lend its run to the next one
            "settings": wandb.Settings(
                console="off",
                init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", _INIT_TIMEOUT)),
                quiet=quiet,
                silent=quiet and mode == "offline",
            ),
        }
        try:
            again: Any = "allow" if self.resume and start.identity and mode == "online" else None
            run = wandb.init(mode=mode, resume=again, **arguments)
        except Exception as error:
            if mode != "online":
                raise
            self._unreachable = True
            self._warn(f"online start failed ({error}); the run is tracked offline")
            if arguments["id"]:
                arguments["id"] += "-offline"  # wandb's service holds the id of what it could not start
            run = wandb.init(mode="offline", **arguments)
        # wandb drops what is logged to a step lower than the last; every expert starts at 0
        run.define_metric("*", step_metric="step")
        return run

    @guard
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._open.log({**metrics, "step": step})

    @guard
    def log_summary(self, table: Table) -> None:
        self._log_table("leaderboard", table.as_rows())
        summary = self._open.summary
        for row in table.rows:
            name = "/".join((*row.group, row.label))
            summary[f"{name}/average"] = row.average.mean
            summary[f"{name}/normalized"] = row.normalized.mean
        merged = [row for row in table.rows if row.kind == "merged" and row.normalized.mean is not None]
        if merged:
            best = max(merged, key=lambda row: row.normalized.mean or 0.0)
            summary["best/merger"] = best.label
            summary["best/average"] = best.average.mean
            summary["best/normalized"] = best.normalized.mean
            summary["best/seconds"] = best.seconds

    @guard
    def log_records(self, records: Sequence[Record]) -> None:
        if records:
            self._log_table(
                "evaluations", [asdict(record) | {"normalized": record.normalized} for record in records]
            )

    def _log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        columns: list[str | int] = list(rows[0]) if rows else []
        self._open.log({name: wandb.Table(columns=columns, data=[list(row.values()) for row in rows])})

    @guard
    def log_figure(self, name: str, path: Path | str) -> None:
        import wandb

        self._open.log({name: wandb.Image(str(path))})

    @guard
    def log_product(self, product: Product) -> None:
        if product.reference in self._here:
            return
        import wandb

        earlier = product.reference in self._logged  # by a run of this tracker: this one only uses it
        used = self._use([product.reference] if earlier else product.inputs)
        if earlier or product.kind == EVALUATIONS:
            if used and self._open.offline:
                self._keep_lineage(used)
            return
        artifact = wandb.Artifact(
            product.name,
            type=product.kind,
            description=product.description or None,
            metadata={**product.metadata, "key": product.key},
        )
        for path in sorted(product.folder.rglob("*")):
            if path.is_file() and (self.weights or path.name == _MANIFEST):
                name = str(path.relative_to(product.folder))
                artifact.add_file(str(path), name=name, policy="immutable", skip_cache=True)
        self._logged[product.reference] = self._open.log_artifact(artifact, aliases=["latest", product.key])
        self._here.add(product.reference)
        if self._open.offline:
            self._keep_lineage(used, name=product.reference, type=product.kind, digest=artifact.digest)

    def _use(self, references: Sequence[str]) -> list[str]:
        """Tell what this run uses; returns what it has not told before and did not make itself."""
        new = [name for name in references if name not in self._here | self._used]
        self._used.update(new)
        if not self._open.offline:
            for name in new:
                known = self._logged.get(name)
                self._open.use_artifact(name if known is None else known.wait())
        return new

    def _keep_lineage(self, used: list[str], **made: str) -> None:
        run = {"run": self._open.id, "entity": self.entity, "project": self.project}
        line = {**run, "name": None, "digest": None, **made, "uses": used}
        with (self._folder / LINEAGE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _end(self) -> None:
        self._open.finish()

    def _resolve_mode(self) -> str:
        import wandb

        settings = wandb.setup().settings
        mode = self.mode or settings.mode
        if mode != "online" or _has_key(settings):
            return mode
        if self.mode == "online":
            self._warn("mode=online, but no API key is configured; the run is tracked offline")
        return "offline"


def require_key() -> None:
    """Raise `InputError` if no API key is configured, because only the server can do this. Nothing prompts for
    one.

    Raises:
        InputError: there is no API key. The message says where to set one.
    """
    import wandb

    settings = wandb.setup().settings
    if not _has_key(settings):
        raise InputError(
            f"no API key of W&B's server {settings.base_url} is configured: run `wandb login`, or set "
            "WANDB_API_KEY (and WANDB_BASE_URL, if the server is your own)"
        )


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys, the axes of a sweep first; values of keys that name a secret are left out.

    Chosen options of groups (`choices`) are under the groups' names.
    """
    choices = config.get("choices", {})
    rest = {key: value for key, value in config.items() if key != "choices"}
    leaves = {name: leaf for key, value in rest.items() for name, leaf in _list_leaves(str(key), value)}
    first = {key: value for axis in _AXES for key, value in leaves.items() if key.split(".")[0] == axis}
    ordered = {**choices, **first, **leaves, **choices}
    return {key: value for key, value in ordered.items() if not _SECRET.search(key)}


def _list_leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _list_leaves(f"{prefix}.{key}", inner)
    else:
        yield prefix, value


def _has_key(settings: Any) -> bool:
    """Whether wandb finds a key: in its settings, as an identity token, or in the netrc entry of its server."""
    if settings.api_key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(settings.base_url).netloc
    # the entry that `wandb login` wrote before the public service moved is still honored by wandb
    hosts = [host, *(["api.wandb.ai"] if host.endswith(".coreweave.com") else [])]
    candidates = [os.environ.get("NETRC"), Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in (Path(candidate).expanduser() for candidate in candidates if candidate):
        try:
            entries = netrc.netrc(path)
        except (OSError, netrc.NetrcParseError):
            continue
        return any((entries.authenticators(host) or ("", "", ""))[2] for host in hosts)
    return False
