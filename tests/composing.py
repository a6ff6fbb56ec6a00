"""Configurations composed as the command line would, among them a quickstart shrunk to seconds."""

from copy import deepcopy
from pathlib import Path
from unittest.mock import patch

from hydra import compose, initialize_config_dir
from hydra._internal.config_repository import ConfigRepository, ConfigResult
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from mergekit_lab.command_line import translate
from mergekit_lab.paths import conf_dir
from mergekit_lab.programs import start

TINY = [
    "+experiment=quickstart",
    "joint=true",
    "training.steps=4",
    "training.warmup_steps=1",
    "training.batch_size=16",
    "curvature.samples=8",
    "search.coefficients=[0.2,1.0]",
    "progress=false",
    "trainer.accelerator=cpu",
    "device=cpu",
    "suite.tasks.digits.train_size=60",
    "suite.tasks.digits.validation_size=40",
    "suite.tasks.digits.test_size=50",
    "~suite.tasks.mnist",
    "~suite.tasks.style",
    "suite.tasks.latin.train_size=104",
    "suite.tasks.latin.validation_size=52",
    "suite.tasks.latin.test_size=78",
]
"""Two tasks: digits and latin."""


_load, _loaded = ConfigRepository.load_config, dict[tuple[str, ...], ConfigResult | None]()


def load_once(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Hydra's reading of a file, which parses every file of every composition anew."""
    key = (*(source.path for source in repository.sources), config_path)
    if key not in _loaded:
        _loaded[key] = _load(repository, config_path)
    return deepcopy(_loaded[key])


def composed(overrides: list[str]):
    """The configuration as `python -m mergekit_lab` would compose it, and the options taken."""
    GlobalHydra.instance().clear()
    options, overrides = partition(translate(overrides))
    with (
        initialize_config_dir(str(conf_dir()), version_base="1.3"),
        patch.object(ConfigRepository, "load_config", load_once),
    ):
        cfg = compose(options.get("--config-name", "main"), overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, choices


def partition(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Hydra's own options, and the overrides."""
    options = dict(each.split("=", 1) for each in arguments if each.startswith("--"))
    return options, [each for each in arguments if not each.startswith("--")]


def merge_command(tmp_path: Path, *arguments: str) -> None:
    """`python -m mergekit_lab +experiment=merge_checkpoints …`."""
    cfg, choices = composed(["+experiment=merge_checkpoints", "progress=false", "device=cpu", *arguments])
    start(cfg, tmp_path / "run", choices, list(arguments))


def plain(cfg):
    return OmegaConf.to_container(cfg, resolve=True)
