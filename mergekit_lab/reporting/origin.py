"""How results were made: command, date, versions and machine, so that a reader can make them again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator

from mergekit_lab.reporting.records import Record, strip_controls

_Text = Annotated[str, AfterValidator(strip_controls)]
_PROGRAM = ("python", "-m", "mergekit_lab")
_OF_ONE_RUN = re.compile(r"[+~]*(run_dir|stage|only|dry_run|progress|hydra\.[\w.]+)(=|$)")
"""Arguments that say where and how far a run goes, and not what it makes."""
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Origin:
    """Of a run, a sweep or a comparison.

    Attributes:
        arguments: of `python -m mergekit_lab`.
        date: when it began to report, ISO 8601.
        versions: of packages, by name.
        machine: system, architecture, cores.
        devices: what arithmetic ran on, cards by their names.
    """

    arguments: tuple[_Text, ...]
    date: _Text
    versions: Mapping[_Text, _Text] = field(default_factory=dict)
    machine: _Text = ""
    devices: tuple[_Text, ...] = ()

    @property
    def command(self) -> str:
        """The command line, as a shell takes it."""
        return shlex.join((*_PROGRAM, *self.arguments))

    def make_command(self, record: Record, mergers: Collection[str]) -> str:
        """The command that makes one model of a run whose mergers have these labels, and no other merge.

        Where a label cannot stand in an override, the run's own command, which makes the model among others.
        """
        arguments = [each for each in self.arguments if not _OF_ONE_RUN.match(each)]
        if record.kind != "joint":
            arguments = [*(each for each in arguments if not each.startswith("joint=")), "joint=false"]
        alone = any(each.startswith("merger=") for each in arguments)  # and the experiment's mergers give way
        others = [] if alone else [label for label in mergers if label != record.merger]
        if all(_NAME.fullmatch(label) for label in others):
            arguments += [f"~mergers.{label}" for label in others]
        return shlex.join((*_PROGRAM, *arguments))

    def list_facts(self) -> list[tuple[str, str]]:
        """Facts that a page shows with the command: names and values."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        facts = [("date", self.date), ("versions", versions), ("machine", self.machine)]
        return [(name, value) for name, value in [*facts, ("device", ", ".join(self.devices))] if value]


def list_commands(runs: Iterable[tuple[Origin | None, Iterable[Record]]]) -> dict[str, str]:
    """By evaluation key the command that makes the evaluated model; of several runs the first's."""
    commands: dict[str, str] = {}
    for origin, records in runs:
        if origin is None:
            continue
        every = list(records)
        mergers = list(dict.fromkeys(record.merger for record in every if record.merger is not None))
        for record in every:
            commands.setdefault(record.evaluation_key, origin.make_command(record, mergers))
    return commands
