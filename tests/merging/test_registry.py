"""A merger that is forgotten somewhere fails here by its name."""

import importlib.util
import pkgutil
import re
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from merging.methods import METHODS
from merging.test_golden import CASES
from omegaconf import OmegaConf

from mergekit_lab import merging
from mergekit_lab.merging import Method
from mergekit_lab.paths import find_conf_dir

HERE = Path(__file__).parent
DOCS = (HERE.parents[1] / "docs" / "mergers.md").read_text(encoding="utf-8")
BASES = {
    "Method",
    "ScaledMethod",
    "SpectralMethod",
    "LayerWeightsMethod",
    "AtomMethod",
    "SparsifiedMethod",
    "SubspaceMethod",
    "WrappingMethod",
    "SphericalMethod",
}
# Pinned elsewhere than by the golden outputs of an original: where.
NOT_GOLDEN = {
    "AdaMerging": "test_adamerging.py",
    "ArceeFusion": "test_against_mergekit.py",
    "Breadcrumbs": "test_against_mergekit.py",
    "CAT": "test_cat.py",
    "ConsensusTA": "test_limits.py",
    "CoreSpace": "test_subspace.py",
    "DARE": "test_golden.py",
    "DELLA": "test_against_mergekit.py",
    "KnOTS": "test_subspace.py",
    "Karcher": "test_against_mergekit.py",
    "LocalizeStitch": "test_localize_stitch.py",
    "ModelStock": "test_against_mergekit.py",
    "MultiSLERP": "test_against_mergekit.py",
    "NearSwap": "test_against_mergekit.py",
    "NuSLERP": "test_against_mergekit.py",
    "Passthrough": "test_against_mergekit.py",
    "RAM": "test_against_mergekit.py",
    "EMR": "../commands/test_per_task.py",
    "TSVC": "../commands/test_per_task.py",
    "RegMeanPlusPlus": "../curvature/test_chained_grams.py",
    "SCE": "test_against_mergekit.py",
    "SLERP": "test_against_mergekit.py",
}
# What a file sets on purpose to something else than the class does.
OWN = {
    "AdaMerging": {"learn"},
    "DARE": {"inner", "seed"},
    "DELLA": {"inner", "seed"},
    "Breadcrumbs": {"inner"},
    "LiNeS": {"inner"},
    "KnOTS": {"inner"},
    "CoreSpace": {"inner"},
    "EpiMer": {"normalize"},
    "RegMean": {"ratio"},
}


@cache
def list_classes() -> dict[str, type[Method]]:
    """The methods that the package's files define."""
    methods: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(merging.__path__):
        if module.name == "gpu_kernels":  # needs Triton
            continue
        values = vars(importlib.import_module(f"mergekit_lab.merging.{module.name}")).values()
        methods |= {v.__name__: v for v in values if isinstance(v, type) and issubclass(v, Method)}
    return {name: cls for name, cls in methods.items() if name not in BASES}


@cache
def read_configurations() -> dict[str, tuple[str, dict[str, Any]]]:
    """Of each class, the file's name and its plain content."""
    contents = {}
    for file in sorted((find_conf_dir() / "merger").glob("*.yaml")):
        content: Any = OmegaConf.to_container(OmegaConf.load(file))
        contents[content.pop("_target_").removeprefix("mergekit_lab.merging.")] = (file.stem, content)
    return contents


every_merger = pytest.mark.parametrize("name", sorted(list_classes()))


def test_every_file_of_a_merger_is_of_one_that_there_is() -> None:
    assert set(read_configurations()) == set(list_classes())
    rows = re.findall(r"^\| `([A-Z]\w+)` \| `", DOCS, flags=re.MULTILINE)
    assert sorted(rows) == sorted(list_classes())


def test_every_merger_is_public() -> None:
    assert {
        name: getattr(merging, name) for name in merging.__all__ if name in list_classes()
    } == list_classes()


@every_merger
def test_a_merger_has_a_configuration_with_every_field_at_its_default(name: str) -> None:
    _, content = read_configurations()[name]
    options = {field.name: field for field in fields(list_classes()[name])}
    assert content.keys() == options.keys()
    for key, value in content.items():
        default = options[key].default
        searched = key == "coefficient" and value is None
        if not searched and key not in OWN.get(name, ()):
            assert default is not MISSING, key
            assert value == default, key


def test_every_merger_has_a_row_in_the_documentation() -> None:
    rows = {f"| `{name}` | `{file}` |" for name, (file, _) in read_configurations().items()}
    assert {row for row in rows if row not in DOCS} == set()


def test_every_merger_is_under_the_laws() -> None:
    assert list_classes().keys() - {type(method).__name__ for method in METHODS.values()} == set()


@every_merger
def test_a_merger_is_pinned_by_an_original_or_where_it_is_said(name: str) -> None:
    golden = name in {type(case[1]).__name__ for case in CASES}
    assert golden != (name in NOT_GOLDEN)
    if not golden:
        assert f"{name}(" in (HERE / NOT_GOLDEN[name]).read_text(encoding="utf-8")


def test_every_merger_has_a_row_in_the_benchmarks_of_time_and_memory() -> None:
    spec = importlib.util.spec_from_file_location(
        "bench", HERE.parents[1] / "experiments/merge_engine/bench.py"
    )
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    assert {type(method).__name__ for method in bench.list_methods().values()} == set(list_classes())
