"""A run from Python: composed as on the command line, with its records as a data frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mergekit_lab.errors import InputError

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from pandas import DataFrame

RECORDS = "records.jsonl"


def run(experiment: str | None = None, overrides: Sequence[str] = ()) -> DataFrame:
    """Run an experiment, and return what it measured.

    Args:
        experiment: an option of `+experiment=`, such as `"quickstart"`; None starts from the defaults.
        overrides: as on the command line, `["optimizer=sam", "seed=1"]`; `progress=false` for no bars. An
            experiment's `device: spread` is `auto` here; a script that asks for it guards its own start with
            `if __name__ == "__main__"`.

    Returns:
        A row for each model and task, with the columns of `records.jsonl`: `label`, `task`, `value`,
        `normalized`, `coefficient` and more. Empty if the stages end without a report. `attrs["folder"]` is
        the run's folder, with `report.html`.

    Raises:
        InputError: a mistake in the configuration, or what the command line would refuse.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.singleton import Singleton
    from omegaconf import open_dict

    from mergekit_lab.command_line import translate
    from mergekit_lab.commands import COMMANDS
    from mergekit_lab.programs import start

    arguments = translate([*([] if experiment is None else [f"+experiment={experiment}"]), *overrides])
    for command in {each.removeprefix("--config-name=") for each in arguments} & set(COMMANDS):
        raise InputError(f"{command} is a command on checkpoints: mergekit_lab.merge and expand do these")
    before = Singleton.get_state()  # a user's own Hydra program stays as it is
    try:
        cfg = _compose(arguments)
        HydraConfig.instance().set_config(cfg)
        choices = dict(cfg.hydra.runtime.choices)
        folder = Path(cfg.run_dir)
        with open_dict(cfg):
            del cfg["hydra"]
            cfg.run_dir = str(folder)  # else `${now:}` would give another name each time it is read
            if cfg.device == "spread" and not any(each.startswith("device=") for each in overrides):
                cfg.device = "auto"  # worker processes would run an unguarded script again
        start(cfg, folder, choices, arguments)
    finally:
        Singleton.set_state(before)
    return _read(folder)


def _compose(overrides: list[str]) -> DictConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    from mergekit_lab.command_line import explain
    from mergekit_lab.paths import find_conf_dir

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(find_conf_dir()), version_base="1.3"):
            return compose("main", overrides, return_hydra_config=True)
    except HydraException as error:
        raise InputError(explain(error)) from None


def _read(folder: Path) -> DataFrame:
    from pandas import DataFrame

    from mergekit_lab.reporting import read_records

    file = folder / RECORDS
    records = read_records(file) if file.is_file() else []
    rows = [{"label": each.label, **asdict(each), "normalized": each.normalized} for each in records]
    frame = DataFrame(rows)
    frame.attrs["folder"] = str(folder)
    return frame
