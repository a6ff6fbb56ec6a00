"""Hydra calls nothing on behalf of a configuration that is none of its parts."""

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from mergekit_lab import InputError
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.schema.hydra_parts import check_hydra, guard_hydra

BAD = "{_target_: mergekit_lab.store.files.discard, path: here}"
LOGS = "hydra.experimental.callbacks.LogJobReturnCallback"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (f"callbacks: {{x: {BAD}}}", "callbacks.x._target_ .*discard'; it must be a Callback"),
        (f"callbacks: {{x: {{_target_: {LOGS}, level: {BAD}}}}}", "callbacks.x.level._target_ .* plain value"),
        ("callbacks: {x: '${evil}'}", "callbacks.x._target_ is 'shutil.rmtree'"),
        ("callbacks: {x: '${hydra:job.name}'}", "callbacks.x is '.{hydra:job.name}'"),
        ("callbacks: {x: {_target_: nowhere.at.all}}", "callbacks.x._target_ is 'nowhere.at.all'"),
        (f"launcher: {{_target_: x, params: {BAD}}}", "launcher.params._target_ .* a class of Optuna"),
        ("sweeper: {sampler: {_target_: optuna.logging.os.remove}}", "sweeper.sampler._target_"),
        ("job_logging: {formatters: {x: {(): shutil.rmtree}}}", r"job_logging.formatters.x.\(\) is 'shutil"),
        ("hydra_logging: {handlers: {x: {class: subprocess.Popen}}}", "hydra_logging.handlers.x.class is 'sub"),
    ],
)
def test_what_hydra_would_call_must_be_of_its_kind(keys: str, message: str, monkeypatch) -> None:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # as before a run
    with pytest.raises(InputError, match=message):
        check_hydra(OmegaConf.create(f"evil: {{_target_: shutil.rmtree}}\nhydra: {{{keys}}}"))


def test_its_own_parts_pass_and_every_composition_is_looked_at(monkeypatch) -> None:
    sampler = "sweeper: {_target_: hydra_plugins.x, sampler: {_target_: optuna.samplers.TPESampler, seed: 0}}"
    handler = "job_logging: {handlers: {x: {class: logging.FileHandler, filename: '${hydra.runtime.cwd}/x'}}}"
    check_hydra(OmegaConf.create(f"hydra: {{{sampler}, {handler}, callbacks: {{x: {{_target_: {LOGS}}}}}}}"))
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", ConfigLoaderImpl.load_configuration)
    guard_hydra()
    overrides = ["+experiment=quickstart", "+hydra.callbacks.x._target_=shutil.rmtree"]
    GlobalHydra.instance().clear()
    with (
        initialize_config_dir(str(find_conf_dir()), version_base="1.3"),
        pytest.raises(InputError, match=r"Callback.*Hydra"),
    ):
        compose("main", overrides, return_hydra_config=True)


@pytest.mark.parametrize("text", ["seed: !!int x", "a:\t- [", "? [a]\n: 1"])
def test_a_file_that_cannot_be_made_into_values_is_named(text: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", ConfigLoaderImpl.load_configuration)
    guard_hydra()
    (tmp_path / "main.yaml").write_text(text)
    GlobalHydra.instance().clear()
    with (
        initialize_config_dir(str(tmp_path), version_base="1.3"),
        pytest.raises(InputError, match=r"main\.yaml.*YAML \("),
    ):
        compose("main")
