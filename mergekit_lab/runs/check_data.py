"""Stage check_data: compare the run's data sets, image by image, with what was published."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig

from mergekit_lab.errors import InputError
from mergekit_lab.schema.check import build
from mergekit_lab.tasks import DataCheck, ImageTask, Task, check_task

log = logging.getLogger(__name__)

FILE = "data_check.json"


def run_check_data(cfg: DictConfig, folder: Path) -> None:
    """Decode every image of every task. Print a summary, and write it to `data_check.json`.

    Raises:
        InputError: images cannot be decoded, or labels do not fit the class names. Raised after all tasks are
            checked.
    """
    if cfg.dry_run:
        log.info("check_data would decode every image of %s", ", ".join(cfg.suite.tasks))
        return
    tasks = [build(node, Task) for node in cfg.suite.tasks.values()]
    checks = []
    for task in tasks:
        if not isinstance(task, ImageTask):
            log.info("%s: no images", task.name)
            continue
        log.info("%s: reading every image", task.name)
        checks.append(check_task(task))
        print("\n".join(describe(checks[-1])))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(
        json.dumps([asdict(check) for check in checks], indent=1, ensure_ascii=False) + "\n"
    )
    log.info("data check %s", folder / FILE)
    if wrong := [line for check in checks for line in check.wrong]:
        raise InputError("; ".join(dict.fromkeys(wrong)) + f": {folder / FILE} has the first of each task")


def describe(check: DataCheck) -> Sequence[str]:
    """The lines that are printed."""
    lines = [f"{check.task}: {check.class_names} classes"]
    for part, c in check.parts.items():
        against = "" if c.published is None else f" (published: {c.published})"
        differs = " DIFFERS" if c.published not in (None, c.images) else ""
        lines.append(
            f"  {part:<10} {c.images} images{against}{differs}, "
            f"{c.classes} classes of {c.smallest} to {c.largest}"
        )
        if c.corrupt_count:
            lines.append(f"    {c.corrupt_count} CORRUPT: {', '.join(c.corrupt[:5])}")
    for pair, count in check.shared.items():
        if count:
            lines.append(f"  SHARED by {pair}: {count} pictures of the second are in the first")
    lines += [f"    {name}" for name in check.shared_names[:5]]
    if check.other_labels:
        lines.append("  the source names its labels otherwise; compare: " + "; ".join(check.other_labels[:60]))
    return lines
