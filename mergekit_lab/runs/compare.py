"""Compare existing runs, reading only their folders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from omegaconf import DictConfig

from mergekit_lab.errors import InputError
from mergekit_lab.reporting import Record, compare, parse_table, print_table, read_records, write_cross_table
from mergekit_lab.reporting.summary import say_count
from mergekit_lab.runs.origin import describe_origin

log = logging.getLogger(__name__)


def check_slice(cfg: DictConfig) -> None:
    """Refuse a `table` or `metric` that the report could not draw, before torch is loaded.

    Raises:
        InputError: a name is unknown; or the table neither has `merger` as a dimension nor fixes one merger.
    """
    if not isinstance(cfg.table, str | None) or not isinstance(cfg.metric, str):
        return  # the schema refuses these
    names, fixed = parse_table(cfg.table or "merger×task", cfg.metric)
    if cfg.table and cfg.runs is None and "merger" not in (*names, *fixed):
        raise InputError(
            f"table={cfg.table}: this run has several mergers: make merger one of the two, or fix one, "
            f"table={cfg.table}@merger:NAME"
        )


def draw_cross_table(cfg: DictConfig, folder: Path, records: list[Record]) -> None:
    """Write and print the table of two dimensions that `table` asks for."""
    if cfg.table:
        print_table(write_cross_table(folder, records, cfg.table, cfg.metric))


def list_runs(cfg: DictConfig) -> list[Path]:
    """The folders that `runs` names.

    Raises:
        InputError: a folder does not exist, or holds no run.
    """
    patterns = [cfg.runs] if isinstance(cfg.runs, str | int) else list(cfg.runs)
    return [folder for pattern in patterns for folder in _find_runs(str(pattern))]


def report_runs(
    cfg: DictConfig, folders: Sequence[Path], out: Path, arguments: Sequence[str] = (), *, sweep: bool = False
) -> None:
    """Write a comparison of existing runs, and print its table and the one of `table`.

    Args:
        folders: of the runs. Runs that only analyze have no rows.
        out: the folder of the comparison.
        arguments: overrides, as on the command line.
        sweep: the runs are jobs of a sweep, which has already reported their failures.

    Raises:
        InputError: none of the runs has a result.
    """
    title = "Comparison of a sweep" if sweep else f"Comparison of {say_count(len(folders), 'run')}"
    paths = compare(folders, out, origin=describe_origin(arguments, sweep=sweep), title=title)
    for failure in () if sweep else paths.failures:
        log.warning("left out: %s: %s", failure.run, failure.error)
    if len(paths.failures) == len(folders) and not sweep:
        raise InputError(f"no run of runs={cfg.runs} has a result; {paths.summary} lists what each lacks")
    if paths.table.rows:
        print_table(paths.table)
        draw_cross_table(cfg, out, read_records(paths.records))
    log.info("comparison %s\nreport %s", paths.summary, paths.html)


def _find_runs(pattern: str) -> list[Path]:
    """The folders of the runs that a path or a glob names. A sweep's folder stands for its jobs."""
    path = Path(pattern).expanduser()
    paths = [path] if path.is_dir() else sorted(map(Path, glob(str(path))))
    folders = [path for path in paths if path.is_dir()]
    if not folders:
        raise InputError(f"runs={pattern}: there is no such folder")
    runs = [job for folder in folders for job in (_find_jobs(folder) or [folder] * _is_run(folder))]
    if not runs:
        raise InputError(f"runs={pattern}: {folders[0]} holds no run (no records.jsonl, no failure.json)")
    return runs


def _find_jobs(folder: Path) -> list[Path]:
    """The numbered folders of a sweep's jobs, including jobs that died before they wrote a file."""
    numbered = [inside for inside in folder.iterdir() if inside.name.isdigit()]
    jobs = [inside for inside in numbered if _is_run(inside) or (inside / ".hydra").is_dir()]
    return sorted(jobs, key=lambda job: int(job.name))


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("records.jsonl", "failure.json"))
