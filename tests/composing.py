"""Configurations composed as the command line would, among them a quickstart shrunk to seconds."""

import pickle
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, ConfigResult
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf, open_dict

from mergekit_lab.command_line import translate
from mergekit_lab.paths import find_conf_dir
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


def compose_config(overrides: list[str]):
    """The configuration as `python -m mergekit_lab` would compose it, and the options taken.

    What is composed of the same options is composed once. Values are set in a copy of it, by Hydra's own code.
    """
    options, overrides = split_arguments(translate(overrides))
    parsed = [parse(line) for line in overrides]
    groups = [each for each in parsed if is_group(each)]
    lines = tuple(str(each.input_line) for each in groups)
    cfg = pickle.loads(compose_options(options.get("--config-name", "main"), lines))
    ConfigLoaderImpl._apply_overrides_to_config([each for each in parsed if each not in groups], cfg)
    cfg.hydra.overrides.task = [each.input_line for each in parsed if not each.is_hydra_override()]
    OmegaConf.set_readonly(cfg.hydra, True)
    HydraConfig.instance().cfg = cfg
    choices = dict(cfg.hydra.runtime.choices)
    cfg = copy(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, choices


def copy(config):
    """As `deepcopy`, five times as fast."""
    return pickle.loads(pickle.dumps(config))


@cache
def parse(line: str) -> Override:
    (override,) = OverridesParser.create().parse_overrides([line])
    return override


def is_group(override: Override) -> bool:
    key = override.key_or_group
    return "/" in key or override.package is not None or (find_conf_dir() / key).is_dir()


_load, _loaded = ConfigRepository.load_config, dict[tuple[str, ...], bytes]()


def load_once(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Hydra's reading of a file, which parses every file of every composition anew."""
    key = (*(source.path for source in repository.sources), config_path)
    if key not in _loaded:
        loaded = _load(repository, config_path)
        try:
            _loaded[key] = pickle.dumps(loaded)
        except pickle.PicklingError:  # of a plugin that Hydra has imported once more
            return loaded
    return pickle.loads(_loaded[key])


@cache
def compose_options(config_name: str, overrides: tuple[str, ...]) -> bytes:
    GlobalHydra.instance().clear()
    with (
        initialize_config_dir(str(find_conf_dir()), version_base="1.3"),
        patch.object(ConfigRepository, "load_config", load_once),
        patch("hydra._internal.defaults_list._create_interpolation_map"),  # no defaults list here has any
    ):
        return pickle.dumps(compose(config_name, list(overrides), return_hydra_config=True))


def split_arguments(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Hydra's own options, and the overrides."""
    options = dict(each.split("=", 1) for each in arguments if each.startswith("--"))
    return options, [each for each in arguments if not each.startswith("--")]


def merge_command(tmp_path: Path, *arguments: str) -> None:
    """`python -m mergekit_lab +experiment=merge_checkpoints …`."""
    cfg, choices = compose_config(["+experiment=merge_checkpoints", "progress=false", "device=cpu", *arguments])
    start(cfg, tmp_path / "run", choices, list(arguments))


def go(folder: Path, store: Path, *overrides: str) -> None:
    """A run of `TINY` with these settings."""
    cfg, choices = compose_config([*TINY, f"store.root={store}", *overrides])
    start(cfg, folder, choices, list(overrides))


def find_pieces(cfg) -> set[str]:
    """What a run is put together from: its stages, classes and ways, wherever they stand."""
    nodes = [cfg.backbone, cfg.finetuning, cfg.optimizer, *cfg.mergers.values(), *cfg.suite.tasks.values()]
    nodes += [node for node in (cfg.merger, *cfg.optimizer_of.values()) if node]
    nodes += [cfg.analysis] if "analyze" in cfg.stage else []
    ways = [f"search {cfg.search.method}", f"experts {bool(cfg.experts)}", f"kind {cfg.backbone.get('kind')}"]
    return {node._target_ for node in nodes} | {str(list(cfg.stage)), *ways}


def to_plain(cfg):
    return OmegaConf.to_container(cfg, resolve=True)


@pytest.fixture(autouse=True)
def _no_hydra_left_behind():
    yield
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


@pytest.fixture(scope="session")
def session_store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")
