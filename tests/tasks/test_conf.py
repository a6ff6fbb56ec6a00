"""Every task and suite configuration composes, names every field, and builds the task it says."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate

from mergekit_lab.tasks import ImageTask

CONF = Path(__file__).resolve().parents[2] / "conf"
TASKS = sorted((CONF / "task").glob("*.yaml"))
SUITES = [f for f in sorted((CONF / "suite").glob("*.yaml")) if not f.stem.startswith("clip")]
CLIP_SUITES = {"clip8": 8, "clip14": 14, "clip20": 20, "clip20_digits": 20, "clip10_mergopt": 10}


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_a_task_file_states_every_field_and_the_class_defaults(path):
    content = yaml.safe_load(path.read_text())
    task = get_class(content.pop("_target_"))
    assert set(content) == {field.name for field in fields(task)}
    made = task(**content)
    assert path.stem in (made.name, f"text7_{made.name}", f"trace_{made.name}", f"glue_{made.name}")
    if issubclass(task, ImageTask):
        assert made == task()


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_suite_composes_into_tasks_keyed_by_name(path):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+suite={path.stem}"])
    assert config.suite.name == path.stem
    tasks = {key: instantiate(value) for key, value in config.suite.tasks.items()}
    assert all(task.name == key for key, task in tasks.items())
    count = path.stem[-1]
    assert not count.isdigit() or len(tasks) == int(count)


@pytest.mark.parametrize(("name", "count"), CLIP_SUITES.items())
def test_the_published_suites_hold_their_tasks_in_the_published_order(name, count):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("main", [f"suite={name}"])
    assert config.suite.name == name
    assert len(config.suite.tasks) == count
    assert list(config.suite.tasks)[:8] == [
        "cars",
        "dtd",
        "eurosat",
        "gtsrb",
        "mnist",
        "resisc45",
        "svhn",
        "sun397",
    ]
    assert all(instantiate(node).name == key for key, node in config.suite.tasks.items())
