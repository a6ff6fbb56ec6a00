"""Every experiment of a paper, and every option of its sweep, is what the shipped table of protocols says."""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from fnmatch import fnmatch
from functools import cache
from typing import Any

import pytest
import yaml
from composing import compose_config
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from mergekit_lab.paths import find_conf_dir
from mergekit_lab.reporting.paper_tables import read_protocols
from mergekit_lab.runs.published import is_equal
from mergekit_lab.schema.run import check

EXPERIMENTS_DIR = find_conf_dir() / "experiment"
PAPERS = ("saft_", "clip_saft", "flan_t5_glue_saft", "epimer_", "*mergopt*")
EXPERIMENTS = [
    file.stem
    for file in sorted(EXPERIMENTS_DIR.glob("*.yaml"))
    if any(fnmatch(file.stem, f"{paper}*") for paper in PAPERS)
]


@cache
def compose_experiment(name: str, *overrides: str) -> DictConfig:
    """The experiment as it is composed; `choice` are the options taken, `sweep` what it goes through."""
    cfg, choices = compose_config([f"+experiment={name}", *overrides])
    sweep = dict(HydraConfig.instance().cfg.hydra.sweeper.get("params") or {})
    with open_dict(cfg):
        cfg["head"] = read_head(EXPERIMENTS_DIR / f"{name}.yaml")
        cfg["choice"], cfg["sweep"] = choices, {key.replace(".", "/"): each for key, each in sweep.items()}
    return cfg


@cache
def compose_option(group: str, name: str | None) -> DictConfig | None:
    """A group's own configuration of an option."""
    if name is None:
        return None
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(find_conf_dir()), version_base="1.3"):
        return compose(f"{group}/{name}")[group]


def read_head(file) -> str:
    """The comments of an experiment, and of the experiments and protocols that it is made of."""
    text = file.read_text()
    parts = [" ".join(line[2:] for line in text.splitlines() if line.startswith("# "))]
    for entry in yaml.safe_load(text).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            folder = find_conf_dir() / "protocol" if entry.startswith("/protocol/") else file.parent
            parts.append(read_head(folder / f"{entry.rpartition('/')[2]}.yaml"))
    return " ".join(parts)


def with_options(name: str, groups: dict[str, str]) -> DictConfig:
    """The experiment with these options. A group it leaves as it is gets the option's own configuration."""
    cfg = compose_experiment(name)
    changed = {group: value for group, value in groups.items() if cfg.choice[group] != value}
    if any(
        to_container(cfg[group]) != to_container(compose_option(group, cfg.choice[group])) for group in changed
    ):
        return compose_experiment(name, *(f"{group}={value}" for group, value in changed.items()))
    cfg = deepcopy(cfg)
    with open_dict(cfg):
        for group, value in changed.items():
            cfg[group] = compose_option(group, value)
            cfg.choice[group] = value
    return cfg


def to_container(node: DictConfig | None) -> Any:
    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node


def compose_jobs(name: str) -> Iterator[dict[str, Any]]:
    """The jobs of an experiment: every option of every axis, not every product. Each is checked as a run is."""
    first = compose_experiment(name)
    options = {key.replace("/", "."): str(values).split(",") for key, values in first.sweep.items()}
    previous, plain = None, {}
    for job in range(max(map(len, options.values()), default=1)):
        chosen = {key: values[min(job, len(values) - 1)] for key, values in options.items()}
        groups = {key: value for key, value in chosen.items() if key in first.choice}
        if groups != previous:
            plain = check_config(with_options(name, groups))
            previous = groups
        own = deepcopy(plain)
        for key, value in chosen.items():
            if key not in groups:
                merger = f"mergers.{chosen.get('merger')}." if key.startswith("merger.") else ""
                put(own, merger + key.removeprefix("merger."), yaml.safe_load(value))
        yield own


def check_config(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, after the check that every run makes."""
    own = {"choice", "sweep", "head"}
    check(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in own]))
    return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]


def put(cfg: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        cfg = cfg[name]
    cfg[last] = value


def look(cfg: dict[str, Any], key: str) -> Any:
    """A value by its key; None where there is none."""
    setting: Any = cfg
    for name in key.split("."):
        setting = setting.get(name) if isinstance(setting, dict) else None
    return setting


def read_protocol(name: str, cfg: dict[str, Any]) -> dict[str, str]:
    """What the table says of a job: values by key; heads have several."""
    lines = {}
    for line in read_protocols():
        if line.is_of(name) and all(holds(cfg, *pair.split("=", 1)) for pair in line.when.split()):
            lines[f"header {line.value}" if line.key == "header" else line.key] = line.value
    return lines


def holds(cfg: dict[str, Any], key: str, value: str) -> bool:
    if key.startswith("header"):
        return value in cfg["head"]
    if key.startswith("sweep."):  # whose keys hold each other: merger and merger.rank
        setting = cfg["sweep"].get(key.removeprefix("sweep.").replace(".", "/"))
    else:
        setting = look(cfg, key)
    if key == "suite.tasks":
        return "+".join(sorted(setting)) == value
    if isinstance(setting, list) and setting and isinstance(setting[0], list):
        return str(setting).replace("'", "").replace(" ", "") == value
    return any(is_equal(setting, each) for each in value.split("|"))


def list_mismatches(name: str, cfg: dict[str, Any]) -> set[str]:
    return {key for key, value in read_protocol(name, cfg).items() if not holds(cfg, key, value)}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_what_its_paper_prints(name: str) -> None:
    for cfg in compose_jobs(name):
        assert len(read_protocol(name, cfg)) >= 5, "the table of protocols does not say what this experiment is"
        assert list_mismatches(name, cfg) == set()


def test_every_line_names_experiments_and_its_source() -> None:
    for line in read_protocols():
        for pattern in line.experiments.split():
            assert any(fnmatch(name, pattern) for name in [*EXPERIMENTS, "clip_epimer"]), pattern
        assert line.source.startswith(("SAFT ", "EpiMer ", "MergOPT ", "ours")), line


MARKED = ("backbone.prompt", "backbone.max_length", "optimizer.momentum", "optimizer.nesterov")
MARKED_OF_ASAM = ("optimizer.scaling", "optimizer.eta")
"""Keys beside the training's that say at their place where they are ours."""


def list_unmarked(name: str, files: Callable[[str], str]) -> set[str]:
    """Keys of a recipe that the paper does not print, and whose line in its file does not say `ours`."""
    choice = compose_experiment(name).choice
    if choice.training == "clip":  # a published recipe, of others
        return set()
    lines = {line.key: line for line in read_protocols() if line.is_of(name)}

    def read_option(group: str, option: str) -> Iterator[str]:
        yield (text := files(f"{group}/{option}.yaml"))
        for base in yaml.safe_load(text).get("defaults", []):
            if base != "_self_" and isinstance(base, str):
                yield from read_option(group, base)

    keys = set()
    for line in lines.values():
        group, _, key = line.key.partition(".")
        if not line.is_ours or (group != "training" and line.key not in MARKED + MARKED_OF_ASAM):
            continue
        asked = dict(pair.split("=") for pair in line.when.split())
        texts = [
            files(f"experiment/{name}.yaml"),
            *read_option(group, asked.get(f"choice.{group}", choice[group])),
        ]
        pattern = re.compile(rf"^ *{key}:.*$", re.M)
        setting = next((match[0] for text in texts if (match := pattern.search(text))), "")
        if "ours" not in setting.partition("#")[2]:
            keys.add(line.key)
    return keys


def read_file(name: str) -> str:
    return (find_conf_dir() / name).read_text()


@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("saft_table1", {"training.weight_decay", *MARKED_OF_ASAM}),
        ("saft_tableC7", {"training.steps"}),
        ("flan_t5_glue_saft", {"training.weight_decay", "backbone.max_length"}),
        ("llama32_1b_trace_mergopt", {"training.schedule", *MARKED}),
    ],
)
def test_what_a_recipe_does_not_find_in_its_paper_says_so_at_its_key(name: str, some: set[str]) -> None:
    assert list_unmarked(name, read_file) == set()
    assert some <= list_unmarked(name, lambda file: read_file(file).replace("ours", ""))


ASK_GRID = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        pytest.param("saft_tableC5", "training.keep", "last", id="1-clip"),
        pytest.param("flan_t5_glue_saft", "training.keep", "last", id="1-glue"),
        pytest.param("saft_table1", "suite.tasks.svhn.validation_most", 5000, id="1-validation"),
        pytest.param("flan_t5_glue_saft", "suite.tasks.sst2.sizes.validation", 2000, id="1-glue-validation"),
        pytest.param("flan_t5_glue_saft", "search.coefficients", ASK_GRID, id="2"),
        pytest.param("epimer_table6", "mergers.ties.coefficient", None, id="3"),
        pytest.param("epimer_table6", "header mergers.ties.aggregator=mean", "the paper's grid", id="3-head"),
        pytest.param("epimer_table6", "mergers.epimer.normalize", "trace", id="4-scale"),
        pytest.param("epimer_table7", "mergers.epimer.normalize", "trace", id="4-scale-7"),
        pytest.param("epimer_table6", "curvature.fraction", None, id="4-samples"),
        pytest.param("epimer_table10", "curvature.samples", 256, id="4-samples-10"),
        pytest.param("epimer_table6", "mergers.fisher.floor", 1e-6, id="4-floor"),
        pytest.param("epimer_table8", "header 1e-8", "", id="4-epsilon"),
        pytest.param("epimer_figure3", "analysis.part", "validation", id="5-part"),
        pytest.param("epimer_figure3", "analysis.batch", None, id="5-batches"),
        pytest.param("epimer_figure3", "analysis.coefficients", [0.2, 0.4, 1.0], id="5-tuned"),
        pytest.param("llama32_1b_mergopt_table10", "backbone.dtype", "bfloat16", id="6"),
        pytest.param("mergopt_figure1", "backbone.dtype", "bfloat16", id="6-figure"),
        pytest.param("saft_figure4", "backbone.precision", "bfloat16", id="6-plane"),
        pytest.param("llama32_1b_mergopt_table13", "published", [], id="8"),
        pytest.param(
            "llama32_1b_mergopt_table13", "sweep.mergers.task_arithmetic.coefficient", None, id="8-sweep"
        ),
        pytest.param("llama32_1b_mergopt_table13", "header its best is no result", "", id="10-chosen-on-test"),
        pytest.param("mergopt_table9", "header k/102", "", id="10-flowers"),
        pytest.param("saft_tableC3", "header mergers.ties.aggregator=sum", "", id="11"),
        pytest.param("saft_table2", "mergers.ties.aggregator", "sum", id="11-aggregator"),
        pytest.param("mergopt_table9_tangent", "mergers.wudi.coefficient", None, id="12"),
        pytest.param("mergopt_table9", "sweep.finetuning", "full,linearized", id="12-sweep"),
        pytest.param("mergopt_table9_tangent", "choice.finetuning", "full", id="12-tangent"),
        pytest.param("saft_figure4", "analysis.box", [0.0, 1.0], id="13-box"),
        pytest.param("saft_figure2", "analysis.others", 0.0, id="13-others"),
        pytest.param("llama32_1b_trace_mergopt", "suite.tasks.meetingbank.metric", "rouge_l", id="14"),
        pytest.param("mergopt_figure3", "suite.tasks", {"numglue_ds": {}}, id="figure-3"),
        pytest.param("saft_table1", "backbone.head", "linear_probe", id="frozen-head"),
        pytest.param("saft_table2", "mergers.ties.election", "frequency", id="majority"),
        pytest.param("flan_t5_glue_saft", "suite.tasks.rte.choices", ["yes", "no"], id="label-words"),
        pytest.param("epimer_table6", "mergers.epimer.coordinates", "full", id="coordinates"),
        pytest.param("epimer_table9", "header its best is no result", "", id="swept-on-test"),
        pytest.param("llama32_1b_trace_mergopt", "training.epochs_of.minuten20", 5, id="epochs"),
        pytest.param("llama32_3b_trace_mergopt", "suite.tasks.scienceqa.metric", "accuracy", id="scienceqa"),
        pytest.param(
            "llama32_1b_trace_mergopt", "optimizer.base._target_", "torch.optim.SGD", id="base-optimizer"
        ),
    ],
)
def test_the_table_finds_an_experiment_that_left_its_paper(name: str, key: str, value: Any) -> None:
    """A number is that of a defect in a shipped experiment.

    7 and 10 are put back in `reporting/test_published.py`, 9 and 15 in `test_published.py` and
    `reporting/test_tables.py`; 13's marks and 14's values above, and in `tasks/test_metrics.py`.
    """
    cfg = check_config(compose_experiment(name))
    assert list_mismatches(name, cfg) == set()
    if key.startswith("header"):
        cfg["head"] = value
    elif key.startswith("sweep."):
        cfg["sweep"][key.removeprefix("sweep.").replace(".", "/")] = value
    else:
        put(cfg, key, value)
    assert key in list_mismatches(name, cfg)
