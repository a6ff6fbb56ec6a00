import inspect
from importlib import import_module
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "conf" / "logger"


@pytest.mark.parametrize("name", ["csv", "tensorboard", "wandb"])
def test_a_logger_config_states_every_field_with_its_default(name):
    config = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    module, _, attribute = config.pop("_target_").rpartition(".")
    target = getattr(import_module(module), attribute)
    fields = inspect.signature(target).parameters
    assert config == {name: field.default for name, field in fields.items()}
    target(**config)
