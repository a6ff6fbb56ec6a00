"""The shipped configurations: every field of every optimizer, at the defaults of its class."""

import inspect

import pytest
import torch
from composing import compose_config, to_plain
from hydra.utils import instantiate
from omegaconf import OmegaConf

from mergekit_lab import optim
from mergekit_lab.paths import find_conf_dir
from optim.problems import Net

FILES = sorted((find_conf_dir() / "optimizer").glob("*.yaml"))
# What a file sets on purpose to something else than the class: SAFT's code, and the run's own numbers.
OWN = {"asam": {"scaling"}, "ssamd": {"steps"}, "swa": {"steps"}, "wasam": {"steps"}}
PLAIN = {"adamw", "sgd"}


def test_every_optimizer_has_a_configuration() -> None:
    targets = [OmegaConf.load(file)._target_ for file in FILES if file.stem not in PLAIN]
    classes = {target.rpartition(".")[2] for target in targets}
    public = (getattr(optim, name) for name in optim.__all__)
    assert classes == {c.__name__ for c in public if isinstance(c, type) and hasattr(c, "evaluate")}


@pytest.mark.parametrize("option", [f.stem for f in FILES if f.stem not in PLAIN])
def test_a_configuration_names_every_field_at_the_default_of_the_class(option: str) -> None:
    cfg, _ = compose_config([f"optimizer={option}", "training.steps=7", "seed=0"])
    make, content = instantiate(cfg.optimizer), to_plain(cfg.optimizer)
    fields = list(inspect.signature(make.func).parameters.values())[1:]
    assert content.keys() - {"_target_", "_partial_"} == {field.name for field in fields}
    for field in fields[1:]:
        if field.name not in OWN.get(option, ()):
            wanted = list(field.default) if isinstance(field.default, tuple) else field.default
            assert content[field.name] == wanted, field.name
    optimizer = make(list(Net().named_parameters()))
    assert optimizer.base.defaults["lr"] == cfg.training.lr
    assert optimizer.base.defaults["weight_decay"] == cfg.training.weight_decay
    assert getattr(optimizer, "steps", 7) == 7


@pytest.mark.parametrize("option", ["mergopt", "wasam"])
def test_a_method_takes_another_base_with_the_options_of_that_base(option: str) -> None:
    cfg, _ = compose_config([f"optimizer={option}", "optimizer@optimizer.base=sgd", "training.lr=0.25"])
    optimizer = instantiate(cfg.optimizer)(list(Net().named_parameters()))
    assert type(optimizer.base) is torch.optim.SGD
    assert optimizer.defaults["lr"] == 0.25
    assert optimizer.defaults["momentum"] == 0.9
