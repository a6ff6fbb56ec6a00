"""Every task and suite configuration composes, names every field, and builds the task it says."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from composing import compose_config
from hydra.utils import get_class, instantiate

from mergekit_lab import tasks
from mergekit_lab.tasks import ImageTask, Task
from mergekit_lab.tasks.glyph_tasks import SHIPPED

CONF = Path(__file__).resolve().parents[2] / "conf"
TASKS = sorted((CONF / "task").glob("*.yaml"))
SUITES = [f for f in sorted((CONF / "suite").glob("*.yaml")) if not f.stem.startswith("clip")]
CLIP_SUITES = [f.stem for f in sorted((CONF / "suite").glob("clip*.yaml"))]


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_a_task_file_states_every_field_and_the_class_defaults(path):
    content = yaml.safe_load(path.read_text())
    task = get_class(content.pop("_target_"))
    assert set(content) == {field.name for field in fields(task)}
    instance = task(**content)
    assert path.stem == instance.name or path.stem.endswith(f"_{instance.name}")
    if issubclass(task, ImageTask):
        assert instance == task()


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_suite_composes_into_tasks_keyed_by_name(path):
    config, _ = compose_config([f"suite={path.stem}"])
    assert config.suite.name == path.stem
    suite_tasks = {key: instantiate(value) for key, value in config.suite.tasks.items()}
    assert all(task.name == key for key, task in suite_tasks.items())
    count = re.search(r"\d*$", path.stem)[0]
    assert not count or len(suite_tasks) == int(count)


def test_the_suite_of_the_harness_states_every_field_of_its_tasks() -> None:
    content = yaml.safe_load((CONF / "suite/lm_eval.yaml").read_text())
    own = {field.name: field.default for field in fields(tasks.HarnessTask) if field.name != "name"}
    assert {key: content[key] for key in own} == {**own, "metric": None}
    assert set(content) - set(own) == {"name", "tasks", "lm_eval_tasks"}


def list_concrete(cls: type) -> set[type]:
    below = set().union(*(list_concrete(sub) for sub in cls.__subclasses__()), cls.__subclasses__())
    ours = {cls for cls in below if cls.__module__.startswith("mergekit_lab.")}
    return {cls for cls in ours if not inspect.isabstract(cls) and not cls.__name__.startswith("_")}


def test_every_task_is_exported_and_has_a_configuration() -> None:
    targets = "".join(path.read_text() for path in (CONF / "task").rglob("*.yaml"))
    bases = {tasks.Handwriting, tasks.GlyphTask}
    by_name = {tasks.HarnessTask}  # suite.lm_eval_tasks names them
    for cls in list_concrete(Task) - bases - by_name:
        assert cls.__name__ in tasks.__all__, f"{cls.__name__} is no name of mergekit_lab.tasks"
        assert f"mergekit_lab.tasks.{cls.__name__}\n" in targets, f"{cls.__name__} has no file in conf/task"


def test_the_page_lists_every_suite_with_its_tasks() -> None:
    page = (CONF.parent / "docs" / "tasks.md").read_text()
    table = page.split("## Which suites are there?")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    in_suites = set()
    for path in (CONF / "suite").glob("*.yaml"):
        (listed,) = (row[1] for row in rows if f"`{path.stem}`" in row[0])
        pairs = re.findall(r"/task(/clip)?@tasks\.(\w+): (\w+)", path.read_text())
        for folder, name, file in pairs:
            assert f"`{name}`" in listed, f"{path.stem}: {name} is missing in docs/tasks.md"
            in_suites.add((CONF / f"task{folder}" / file).with_suffix(".yaml"))
    assert in_suites == set((CONF / "task").rglob("*.yaml"))


def test_pretraining_keeps_clear_of_every_rendered_task() -> None:
    assert set(SHIPPED) == list_concrete(tasks.GlyphTask)


@pytest.mark.parametrize("name", CLIP_SUITES)
def test_the_published_suites_hold_their_tasks_in_the_published_order(name):
    config, _ = compose_config([f"suite={name}"])
    assert config.suite.name == name.removesuffix("_saft"), "the same tasks, with that paper's validation"
    assert len(config.suite.tasks) == int(re.search(r"\d+", name)[0])
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
