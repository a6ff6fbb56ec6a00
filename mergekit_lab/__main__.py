"""`python -m mergekit_lab +experiment=quickstart`, or `mergekit-lab` alike."""

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mergekit_lab.errors import InputError
from mergekit_lab.paths import find_conf_dir

# OpenMP threads spin while they wait for each other. With the default limit, two runs on the same cores take
# twenty times as long as one. This limit costs a single run nothing. torch reads it when it is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_FULL_ERROR = "HYDRA_FULL_ERROR" in os.environ


class UserError(CompactHydraException):
    """An `InputError` as Hydra prints a user's mistake: the message alone, exit code 1."""


@hydra.main(version_base="1.3", config_path=str(find_conf_dir()), config_name="main")
def main(cfg: DictConfig) -> float | None:
    """What Hydra calls with a composed configuration."""
    from mergekit_lab.programs import start

    settings = HydraConfig.get()
    try:
        overrides: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)  # with their `${…}`
        return start(cfg, Path(settings.runtime.output_dir), settings.runtime.choices, overrides)
    except InputError as error:
        if settings.mode is RunMode.RUN and not _FULL_ERROR:  # a sweep learns of failures by exceptions
            raise SystemExit(str(error)) from None
        raise UserError(str(error)) from error


def _run() -> None:
    """Call `main`. Hydra's errors about the command line become one line with the nearest name."""
    from mergekit_lab.command_line import check_config_files, explain
    from mergekit_lab.schema.hydra_parts import guard_hydra

    guard_hydra()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise what Hydra would print
    try:
        check_config_files(sys.argv[1:])
        main()
    except (CompactHydraException, InputError) as error:
        if _FULL_ERROR:
            raise
        print(explain(error), file=sys.stderr)
        sys.exit(1)


def run() -> None:
    """The command line, from what a user typed to the exit code."""
    from mergekit_lab.command_line import answer, explain_stop, translate
    from mergekit_lab.console import outlive_console
    from mergekit_lab.programs import load_torch_ahead
    from mergekit_lab.scratch import gather_temporary_files
    from mergekit_lab.workers import leave, raise_on_sigterm

    outlive_console()
    atexit.register(gc.freeze)  # else Python collects garbage among torch's objects at exit, for half a second
    is_script = Path(sys.argv[0]).stem == "mergekit-lab"
    text = answer(sys.argv[1:], "mergekit-lab" if is_script else "python -m mergekit_lab")
    if text is not None:
        print(text)
        return
    load_torch_ahead()
    try:
        here = os.getcwd()
    except OSError:
        sys.exit("the working folder was deleted: change to another")
    if here not in sys.path:  # `_target_` may name a module here, and a console script has only its own folder
        sys.path.insert(0, here)
    gather_temporary_files()
    sys.argv[1:] = translate(sys.argv[1:])
    raise_on_sigterm()
    try:
        _run()
    except KeyboardInterrupt:
        print(explain_stop(sys.argv[1:]), file=sys.stderr)
        leave(130)


if __name__ == "__main__":
    run()
