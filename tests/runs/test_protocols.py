"""Every experiment of a paper, and every option of its sweep, is what the shipped table of protocols says."""

import csv
from collections.abc import Iterator
from copy import deepcopy
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml
from composing import composed
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

import mergekit_lab
from mergekit_lab.paths import conf_dir
from mergekit_lab.runs.published import is_equal
from mergekit_lab.schema.run import check

FILE = next(iter(mergekit_lab.__path__)) + "/assets/protocols.csv"
with open(FILE) as stream:
    LINES = list(csv.DictReader(line for line in stream if not line.startswith("#")))
PAPERS = ("saft_", "clip_saft", "flan_t5_glue_saft", "epimer_", "*mergopt*")
EXPERIMENTS = [
    file.stem
    for file in sorted((conf_dir() / "experiment").glob("*.yaml"))
    if any(fnmatch(file.stem, f"{paper}*") for paper in PAPERS)
]


def jobs(name: str) -> Iterator[DictConfig]:
    """The jobs of an experiment, with `choice` and `sweep`: every option of every axis, not every product.

    Options of groups are composed by Hydra; plain values are set.
    """
    first, choices = composed([f"+experiment={name}"])
    sweep = dict(HydraConfig.instance().cfg.hydra.sweeper.get("params") or {})
    options = {key: str(values).split(",") for key, values in sweep.items()}
    previous: dict[str, str] = {}
    for job in range(max(map(len, options.values()), default=1)):
        chosen = {key: values[min(job, len(values) - 1)] for key, values in options.items()}
        groups = {key: value for key, value in chosen.items() if key in choices}
        if groups != previous:
            first, choices = composed([f"+experiment={name}", *(f"{k}={v}" for k, v in groups.items())])
            previous = groups
        cfg = deepcopy(first)
        for key, value in chosen.items():
            if key not in groups:
                merger = f"mergers.{chosen.get('merger')}." if key.startswith("merger.") else ""
                OmegaConf.update(cfg, merger + key.removeprefix("merger."), yaml.safe_load(value))
        check(cfg)
        yield describe(cfg, choices, sweep)


def describe(cfg: DictConfig, choices: dict[str, str], sweep: dict[str, str]) -> DictConfig:
    with open_dict(cfg):
        cfg["choice"] = choices
        cfg["sweep"] = {key.replace(".", "/"): values for key, values in sweep.items()}
    return cfg


def protocol(name: str, cfg: DictConfig) -> dict[str, str]:
    """What the table says of a job: values by key."""
    said = {}
    for line in LINES:
        named = any(fnmatch(name, pattern) for pattern in line["experiments"].split())
        if named and all(holds(cfg, *pair.split("=", 1)) for pair in line["when"].split()):
            said[line["key"]] = line["value"]
    return said


def holds(cfg: DictConfig, key: str, value: str) -> bool:
    found: Any
    if key.startswith("sweep."):  # whose keys hold each other: merger and merger.rank
        found = cfg.sweep.get(key.removeprefix("sweep.").replace(".", "/"))
    else:
        found = OmegaConf.select(cfg, key)
    if key == "suite.tasks":
        return "+".join(sorted(found)) == value
    if isinstance(found, ListConfig) and found and isinstance(found[0], ListConfig):
        return str(OmegaConf.to_container(found)).replace("'", "").replace(" ", "") == value
    return any(is_equal(found, each) for each in value.split("|"))


def mismatches(name: str, cfg: DictConfig) -> set[str]:
    return {key for key, value in protocol(name, cfg).items() if not holds(cfg, key, value)}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_what_its_paper_prints(name: str) -> None:
    for cfg in jobs(name):
        assert len(protocol(name, cfg)) >= 5, "the table of protocols does not say what this experiment is"
        assert mismatches(name, cfg) == set()


def test_every_line_names_experiments_and_its_source() -> None:
    for line in LINES:
        for pattern in line["experiments"].split():
            assert any(fnmatch(name, pattern) for name in [*EXPERIMENTS, "clip_epimer"]), pattern
        assert line["source"].startswith(("SAFT ", "EpiMer ", "MergOPT ", "ours")), line


@pytest.mark.parametrize(
    ("name", "defect", "key"),
    [
        ("saft_tableC5", "training.keep=last", "training.keep"),
        ("flan_t5_glue_saft", "training.keep=last", "training.keep"),
        ("flan_t5_glue_saft", "search=grid", "search.coefficients"),
        ("epimer_table6", "mergers.ties.coefficient=null", "mergers.ties.coefficient"),
        ("epimer_table6", "mergers.epimer.normalize=trace", "mergers.epimer.normalize"),
        ("epimer_table6", "curvature=as_needed", "curvature.fraction"),
        ("epimer_table6", "mergers.fisher.floor=1e-6", "mergers.fisher.floor"),
        ("epimer_table7", "mergers.epimer.normalize=trace", "mergers.epimer.normalize"),
        ("epimer_figure3", "analysis.part=validation", "analysis.part"),
        ("epimer_figure3", "analysis.batch=null", "analysis.batch"),
        ("llama32_1b_mergopt_table10", "backbone.dtype=bfloat16", "backbone.dtype"),
        ("llama32_1b_mergopt_table13", "published=[]", "published"),
        ("mergopt_table9_tangent", "mergers.wudi.coefficient=null", "mergers.wudi.coefficient"),
        ("mergopt_table9_tangent", "finetuning=full", "choice.finetuning"),
        ("saft_figure4", "analysis.box=[0.0,1.0]", "analysis.box"),
        ("saft_figure2", "analysis.others=0.0", "analysis.others"),
    ],
)
def test_the_table_finds_an_experiment_that_left_its_paper(name: str, defect: str, key: str) -> None:
    cfg, choices = composed([f"+experiment={name}", defect])
    assert key in mismatches(name, describe(cfg, choices, {}))
