"""Text tasks: prompts with answers, from files of the usual kinds or from the hub.

A sample is a prompt and its answer. The task says what a prompt contains. The backbone says how a model sees
it, such as by a chat template.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from string import Formatter
from typing import Any

import torch

from mergekit_lab.checkpoints import explain_unreachable
from mergekit_lab.errors import InputError, join_names, say_error, suggest
from mergekit_lab.paths import find_default_store
from mergekit_lab.ranges import Count, check_value, require_choice

from .metrics import METRICS
from .sources import explain_parquet_errors
from .task import PARTS, Part, Task

log = logging.getLogger(__name__)

KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True, eq=False)
class TextSamples:
    """One part of a text task: prompts and their answers."""

    prompts: tuple[str, ...]
    answers: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.answers):
            raise InputError(
                f"{len(self.prompts)} prompts have {len(self.answers)} answers; one each is needed"
            )

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class TextTask(Task):
    """Prompts and answers.

    Args:
        name: the task's name.
        metric: one of `tasks.metrics.METRICS`.
        choices: the possible answers, if there is a fixed set. A model can then pick the likeliest instead of
            generating.
        max_new_tokens: the most tokens of a generated answer.
        templates: texts with one `{}` for a choice. An encoder's zero-shot head averages over them.
    """

    metric: str = "accuracy"
    choices: tuple[str, ...] | None = None
    max_new_tokens: int = 32
    templates: tuple[str, ...] = ("{}",)

    def __post_init__(self) -> None:
        require_choice(f"task {self.name!r}: metric", self.metric, METRICS)
        if self.choices is not None:
            object.__setattr__(self, "choices", tuple(self.choices))
            if len(set(self.choices)) < max(2, len(self.choices)):
                raise InputError(
                    f"task {self.name!r}: choices are {list(self.choices)}; two or more, all different"
                )
        check_value(self.max_new_tokens, Count, f"task {self.name!r}: max_new_tokens")
        object.__setattr__(self, "templates", tuple(self.templates))
        wrong = [template for template in self.templates if "{}" not in template]
        if wrong or not self.templates:
            raise InputError(
                f"task {self.name!r}: templates need '{{}}' for the choice; at fault: {wrong or 'none given'}"
            )

    def check(self, part: Part, samples: TextSamples) -> None:
        """Check that answers are among the choices and not empty."""
        if self.choices is not None:
            odd = set(samples.answers) - set(self.choices)
            if odd:
                raise InputError(
                    f"task {self.name!r}: {part} has answers that are not among the choices "
                    f"({join_names(sorted(odd))}); choices are {join_names(self.choices)}"
                )
        if not all(samples.answers):
            raise InputError(f"task {self.name!r}: {part} has an empty answer, which teaches nothing")

    def digest(self) -> str:
        """Hash of name, choices and the text of all three parts. Warns of prompts that two parts share."""
        digest = hashlib.sha256(repr((self.name, self.choices)).encode())
        for part in PARTS:
            samples = self.load_samples(part)
            digest.update(repr((part, samples.prompts, samples.answers)).encode("utf-8", "surrogatepass"))
        for one, other in combinations(PARTS, 2):  # a score on what was trained on, or chosen by, says little
            known, prompts = set(self.load_samples(one).prompts), self.load_samples(other).prompts
            if shared := sum(prompt in known for prompt in prompts):
                log.warning(
                    "%s: %d of %d prompts of %s are in %s too", self.name, shared, len(prompts), other, one
                )
        return digest.hexdigest()


@dataclass(frozen=True)
class TextFile(TextTask):
    """A task from tables: a file, a folder of files, or a data set of the hub, with a prompt template.

    Args:
        source: a folder with `train`, `validation` and `test` as `.jsonl`, `.json`, `.csv`, `.tsv` or
            `.parquet`; one such file; or `hub:org/name` or `hub:org/name/configuration`, which is downloaded
            once. A relative folder is looked up under `$MERGEKIT_LAB_DATA`, by default `data` in the store. Of
            a single file, validation and test get a quarter each unless `sizes` says otherwise.
        prompt: a template with column names in braces, such as `"{sentence}\\nSentiment:"`.
        answer: a template too; by default the column `answer`.
        labels: words for an answer's values, such as `{"0": "negative", "1": "positive"}`.
        parts: the source's name of a part, if it differs. Parts taken from the same one share no rows: after a
            seeded shuffle, validation takes its rows first.
        sizes: the most samples of a part, taken after a seeded shuffle.
        seed: seeds the shuffle.
    """

    source: str = ""
    prompt: str = "{prompt}"
    answer: str = "{answer}"
    labels: Mapping[str, str] | None = field(default=None, hash=False)
    parts: Mapping[str, str] | None = field(default=None, hash=False)
    sizes: Mapping[str, int] | None = field(default=None, hash=False)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("parts", "sizes"):
            for part in getattr(self, name) or ():
                if part not in PARTS:
                    raise InputError(f"task {self.name!r}: {name} names {part!r}{suggest(part, PARTS)}")
        if self.labels is not None:  # YAML reads an unquoted 0 as a number
            object.__setattr__(self, "labels", {str(value): word for value, word in self.labels.items()})
        if not self.source:
            raise InputError(f"task {self.name!r} has no source: a folder, or hub:org/name")
        for name in ("prompt", "answer"):
            try:
                list(Formatter().parse(getattr(self, name)))
            except ValueError as error:
                raise InputError(
                    f"task {self.name!r}: {name} is {getattr(self, name)!r}, which is not a template "
                    f"({error}): put columns in braces, and double a brace of the text itself"
                ) from None

    def make(self, part: Part) -> TextSamples:
        rows = self._read_rows(part)
        prompts = tuple(fill_template(self.prompt, row, self.name) for row in rows)
        answers = tuple(self._spell(fill_template(self.answer, row, self.name)) for row in rows)
        return TextSamples(prompts, answers)

    def _spell(self, value: str) -> str:
        if self.labels is None:
            return value
        if value not in self.labels:
            raise InputError(
                f"task {self.name!r}: labels has no word for {value!r}; it has {join_names(self.labels)}"
            )
        return self.labels[value]

    def _read_rows(self, part: Part) -> list[Mapping[str, Any]]:
        source_part = {p: (self.parts or {}).get(p, p) for p in PARTS}
        sizes: Mapping[str, int] = self.sizes or {}
        if not self.source.startswith("hub:") and find_data_folder(self.source).is_file():
            source_part = dict.fromkeys(PARTS, "all")
            quarter = len(read_rows(self.source, "all", self.name)) // 4
            sizes = {"validation": quarter, "test": quarter, **sizes}
        rows = read_rows(self.source, source_part[part], self.name)
        generator = torch.Generator().manual_seed(self.seed)
        order: list[int] = torch.randperm(len(rows), generator=generator).tolist()
        taken = 0
        for other in ("validation", "test", "train"):
            if source_part[other] != source_part[part]:
                continue
            wanted = sizes.get(other)
            if wanted is None and other != part and other != "train":
                raise InputError(
                    f"task {self.name!r}: {other} and {part} are both cut from {source_part[part]!r}: "
                    f"set sizes.{other}, its number of rows"
                )
            chosen = order[taken:] if wanted is None else order[taken : taken + wanted]
            if other == part:
                return [rows[i] for i in chosen]
            taken += len(chosen)
        raise AssertionError(part)


def fill_template(template: str, row: Mapping[str, Any], task: str) -> str:
    """Fill a template with a row's columns.

    Raises:
        InputError: the row lacks a column of the template, has no value in it, or one of the wrong kind.
    """
    for name in (name for _, name, _, _ in Formatter().parse(template) if name is not None):
        if name not in row:
            raise InputError(f"task {task!r}: the template {template!r} names {name!r}{suggest(name, row)}")
        if row[name] is None:
            raise InputError(
                f"task {task!r}: a row has nothing in the column {name!r}, which the template {template!r} "
                f"names: leave such rows out of the data ({str(row)[:80]})"
            )
    try:
        return template.format_map(row)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"task {task!r}: the template {template!r} does not fit a row: {error} ({str(row)[:80]})"
        ) from None


def find_data_folder(source: str) -> Path:
    """A folder of data: an absolute path, or one under `$MERGEKIT_LAB_DATA`, by default `data` in the store."""
    named = os.environ.get("MERGEKIT_LAB_DATA")
    return (Path(named) if named else find_default_store() / "data") / Path(source).expanduser()


@cache
def read_rows(source: str, part: str, task: str) -> list[Mapping[str, Any]]:
    """Read a source's part, under the source's name of it, as mappings by column.

    Raises:
        InputError: the part is missing or is no table. The message says how to get it.
    """
    if source.startswith("hub:"):
        return _read_hub_rows(source.removeprefix("hub:"), part, task)
    folder = find_data_folder(source)
    files = [folder] if folder.suffix in KINDS else [folder / f"{part}{kind}" for kind in KINDS]
    table = next((file for file in files if file.is_file()), None)
    if table is None:
        raise InputError(
            f"task {task!r}: {folder} has no {part}{'|'.join(KINDS)}: put the data there, name another place "
            f"with suite.tasks.{task}.source=FOLDER, or prepare it (docs/language_models.md says how for the "
            "suites that are known)"
        )
    try:
        rows: list[Any] = list(_read_table(table))
    except (ValueError, KeyError, OSError, RecursionError, csv.Error) as error:
        raise InputError(f"task {task!r}: {table} cannot be read as a table: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise InputError(
                f"task {task!r}: {table} is not a list of rows with columns: row {number} is {str(row)[:40]!r}"
            )
    return rows


def _read_table(file: Path) -> Iterator[Mapping[str, Any]]:
    if file.suffix == ".jsonl":
        for line in file.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                yield json.loads(line)
    elif file.suffix == ".json":
        content = json.loads(file.read_text(encoding="utf-8"))
        yield from content if isinstance(content, list) else [content]
    elif file.suffix == ".parquet":
        from pyarrow import parquet

        with explain_parquet_errors(file):
            yield from parquet.read_table(file).to_pylist()
    else:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.DictReader(stream, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
            for row in rows:
                if None in row:
                    raise ValueError(f"line {rows.line_num} has more fields than the header has columns")
                yield row


def _read_hub_rows(name: str, part: str, task: str) -> list[Mapping[str, Any]]:
    from datasets import DownloadConfig, load_dataset

    offline = explain_unreachable()
    organization, repository, *configuration = name.split("/")
    options: dict[str, Any] = {"name": configuration[0]} if configuration else {}
    try:
        data = load_dataset(
            f"{organization}/{repository}",
            split=part,
            download_config=DownloadConfig(max_retries=1, local_files_only=offline is not None),
            **options,
        )
    except Exception as error:  # the hub's clients raise errors of many libraries
        cause = offline or say_error(error)
        raise InputError(
            f"task {task!r}: cannot get {part} of hub:{name}: {cause}. It is downloaded once and then cached "
            f"(HF_HOME): run once with internet access, or set suite.tasks.{task}.source to a folder of "
            "train, validation and test as .parquet, .jsonl or .csv"
        ) from None
    return list(data)
