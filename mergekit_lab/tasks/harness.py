"""Tasks of EleutherAI's lm-evaluation-harness. They score models; nothing is trained on them.

The extra `lm_eval` installs it as `lm-eval` (https://github.com/EleutherAI/lm-evaluation-harness). It is
imported when a task is looked up.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from annotated_types import Ge, Gt

from mergekit_lab.digests import hash_folder
from mergekit_lab.errors import InputError, join_names, suggest

from .task import Part, Task

_PACKAGE = "lm_eval"
_MISSING = "tasks of lm-evaluation-harness need the package lm-eval: pip install 'mergekit_lab[lm_eval]'"


@dataclass(frozen=True)
class HarnessTask(Task):
    """A task of the harness, or a group of tasks that has its own score.

    Args:
        name: the task's name in the harness.
        num_fewshot: examples before each question; None takes the task's number. A task that sets 0 keeps 0.
        limit: number of samples to score, or a share below 1; None scores all. For trials, not for tables.
        metric: the metric in tables, such as `acc_norm`, or with its filter `exact_match,strict-match`. ""
            takes the task's first metric that is at most 1 and better when larger. All metrics are kept, so
            changing this recomputes nothing.
        apply_chat_template: format prompts by the tokenizer's chat template, with examples as turns.
        batch_size: rows at a time. "auto" takes what the harness finds to fit on CUDA, else 4.
        include_path: a folder with your own task files.
        confirm_run_unsafe_code: allow tasks that execute code written by the model.
    """

    num_fewshot: Annotated[int, Ge(0)] | None = None
    limit: Annotated[float, Gt(0)] | None = None
    metric: str = ""
    apply_chat_template: bool = False
    batch_size: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    include_path: str | None = None
    confirm_run_unsafe_code: bool = False

    def make(self, part: Part) -> NoReturn:
        raise InputError(
            f"task {self.name!r} is lm-evaluation-harness's: it scores models, and has no {part} part to learn "
            "or choose from"
        )

    def check(self, part: Part, samples: Any) -> None:
        self.make(part)

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.describe_content(), sort_keys=True).encode()).hexdigest()

    def describe_content(self) -> dict[str, Any]:
        """What decides a score besides the model: versions, settings, and the bytes of your own task files.

        Raises:
            InputError: the harness is not installed, or has no such task.
        """
        content: dict[str, Any] = {
            "lm_eval": _find_version(),
            "task": self.name,
            "version": self.find_version(),
            "num_fewshot": self.num_fewshot,
            "limit": self.limit,
            "apply_chat_template": self.apply_chat_template,
        }
        return content | ({"files": _hash_files(self.include_path)} if self.include_path else {})

    def find_version(self) -> Any:
        """The version in the task's file, or None."""
        entry = self.find_manager().task_index[self.name]
        return ((entry.cfg or {}).get("metadata") or {}).get("version")

    def find_manager(self) -> Any:
        """The harness's index of task files, which includes this task.

        Raises:
            InputError: the harness is not installed, or has no such task with its own score.
        """
        if self.include_path and self.name in _index_tasks(self.include_path, False).all_subtasks:
            return _index_tasks(self.include_path, False)
        manager = _index_tasks(self.include_path, True)
        entry = manager.task_index.get(self.name)
        if entry is None:
            raise InputError(
                f"lm-evaluation-harness {_find_version()} has no task {self.name!r} (suite.include_path names "
                f"a folder with more){suggest(self.name, manager.all_tasks)}"
            )
        is_group = self.name in manager.all_groups
        if self.name in manager.all_tags or (is_group and not (entry.cfg or {}).get("aggregate_metric_list")):
            members = sorted(entry.tags) or [str(each) for each in (entry.cfg or {}).get("task", ())]
            raise InputError(
                f"{self.name!r} is a group of lm-evaluation-harness's tasks without a score: name its tasks "
                f"({join_names(members, 10)})"
            )
        return manager


def _find_version() -> str:
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        raise InputError(_MISSING) from None


@cache
def _index_tasks(include_path: str | None, defaults: bool) -> Any:
    """Reads every task file, thousands of them with the harness's own: some seconds, once per process."""
    _find_version()
    from lm_eval.tasks import TaskManager

    logging.getLogger(_PACKAGE).setLevel(logging.ERROR)
    folder = Path(include_path).expanduser() if include_path else None
    if folder and not folder.is_dir():
        raise InputError(f"suite.include_path={include_path} is not a folder")
    return TaskManager(include_path=folder, include_defaults=defaults)


def _hash_files(folder: str) -> str:
    """Of all files of a folder, their names and bytes."""
    root = Path(folder).expanduser()
    files = sorted(file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return hash_folder(root, files)
