"""`python -m mergekit_lab +experiment=quickstart`"""

import gc
import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import DictConfig

from mergekit_lab.errors import InputError
from mergekit_lab.paths import conf_dir

# Read when torch loads. By default its threads spin so long at barriers that two runs on the same cores
# take twenty times as long as one; so they share them, and a run alone is as fast.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")


class UserError(CompactHydraException):
    """An `InputError` as Hydra prints a user's mistake: the message alone, exit code 1."""


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="main")
def main(cfg: DictConfig) -> float | None:
    gc.disable()  # imports leave 180,000 objects that stay: looking for garbage among them takes a tenth longer
    from mergekit_lab.runs.run import run

    gc.enable()
    settings = HydraConfig.get()
    try:
        return run(
            cfg, Path(settings.runtime.output_dir), settings.runtime.choices, list(settings.overrides.task)
        )
    except InputError as error:
        raise UserError(str(error)) from error


_ON_CHECKPOINTS = ("diagnose", "expand", "merge_checkpoints")


def _for_hydra(arguments: list[str]) -> list[str]:
    """The command line as Hydra can read it.

    Its grammar knows no ×, which reports are asked for with (`table=optimizer×merger`). Stages on checkpoints
    have a configuration of their own, the experiment of their name: `stage=diagnose` takes it.
    """
    read = [each.replace("×", "*") if each.startswith("table=") else each for each in arguments]
    if not any(each.startswith("+experiment=") for each in read):
        read += [f"+experiment={stage}" for stage in _ON_CHECKPOINTS if f"stage={stage}" in read]
    return read


if __name__ == "__main__":
    from mergekit_lab.console import outlive_console
    from mergekit_lab.scratch import gather_temporary_files
    from mergekit_lab.workers import leave, raise_on_sigterm

    outlive_console()
    gather_temporary_files()
    sys.argv[1:] = _for_hydra(sys.argv[1:])
    raise_on_sigterm()
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        leave(130)
