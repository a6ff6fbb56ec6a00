"""Code from outside the package is part of what names its results."""

import importlib
import shutil
from hashlib import sha256
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from composing import TINY, compose_config
from omegaconf import OmegaConf

from mergekit_lab import InputError
from mergekit_lab.runs.analyze import declare_analysis
from mergekit_lab.runs.combine import describe_merge
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.mergers import build_mergers
from mergekit_lab.runs.own_code import describe_code
from mergekit_lab.runs.run import Run
from mergekit_lab.schema.run import Search

MODULE = """
from dataclasses import dataclass
from mergekit_lab.merging import TaskArithmetic
from mergekit_lab.backbones import OpenClip
from mergekit_lab.optim import SAM
from mergekit_lab.runs.analyses import EntryDistribution

class MySAM(SAM):
    pass

class MyClip(OpenClip):
    pass

class MyAnalysis(EntryDistribution):
    pass

@dataclass(frozen=True, kw_only=True)
class ReadsMine(TaskArithmetic):
    side_inputs = ("mine",)

@dataclass(frozen=True, kw_only=True)
class Mine(TaskArithmetic):
    def merge(self, name, base, deltas, site):
        return {factor} * super().merge(name, base, deltas, site)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes the module anew, with another factor, and loads it as a fresh process would."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(factor: int, more: str = ""):
        file = tmp_path / "my_own_code.py"
        file.write_text(MODULE.replace("{factor}", str(factor)) + more)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        return importlib.reload(importlib.import_module("my_own_code"))

    return load


def name_artifacts(tmp_path, shared, **classes: str) -> dict[str, str]:
    cfg, choices = compose_config([*TINY, "optimizer=sam", "merger=task_arithmetic", "analysis=distribution"])
    cfg.store.root = str(tmp_path / "store")
    for group, name in classes.items():
        cfg[group]._target_ = f"my_own_code.{name}"
    run = Run(cfg, tmp_path, choices, shared)
    merger = next(iter(run.mergers.values()))
    return {
        "expert": declare_expert(run, "digits").content,
        "merge": describe_merge(run, merger),
        "analysis": declare_analysis(run).content,
    }


def test_an_edited_class_of_ones_own_gets_other_keys(tmp_path, module) -> None:
    shared: dict[str, Any] = {}
    assert "code" not in str(name_artifacts(tmp_path, shared))
    for group, name, kinds in (
        ("merger", "Mine", {"merge"}),
        ("optimizer", "MySAM", {"expert", "merge", "analysis"}),
        ("backbone", "MyClip", {"expert", "merge", "analysis"}),
        ("analysis", "MyAnalysis", {"analysis"}),
    ):
        contents = []
        for factor in (1, 2):
            module(factor)
            contents.append(name_artifacts(tmp_path, shared, **{group: name}))
        one, other = contents
        assert {kind for kind in one if one[kind] != other[kind]} == kinds, group


def test_what_is_edited_while_a_run_works_does_not_name_what_the_run_makes(tmp_path, module) -> None:
    cfg, choices = compose_config([*TINY, "merger=task_arithmetic"])
    cfg.merger._target_ = "my_own_code.Mine"
    codes = []
    for factor in (1, 2):
        file = Path(module(factor).__file__)
        run = Run(cfg, tmp_path, choices)
        file.write_text("")
        codes.append(describe_merge(run, run.mergers["task_arithmetic"])["code"])
        codes.append(describe_code({"_target_": "my_own_code.ReadsMine"})["code"])
    assert [list(code.values()) for code in codes[:2]] != [list(code.values()) for code in codes[2:]]
    assert len({value for code in codes for value in code.values()}) == 2


def test_a_later_spec_in_the_memory_of_a_freed_one_is_another(module) -> None:
    own = module(1)
    describe_code({"_target_": "my_own_code.Mine"})
    Path(own.__file__).write_text("")
    own.__spec__ = None
    own.__spec__ = ModuleSpec("my_own_code", None)
    (code,) = describe_code({"_target_": "my_own_code.ReadsMine"})["code"].values()
    assert code == sha256(b"").hexdigest()[:16]


def test_a_class_may_name_its_own_version(module) -> None:
    own = [module(factor, "    code_version = 'second'\n") for factor in (1, 2)]
    node = {"inner": [{"_target_": "my_own_code.Mine"}, {"_target_": "torch.optim.AdamW"}]}
    assert own[0] is own[1]
    assert describe_code(node) == {"code": {"my_own_code.Mine": "second"}}
    assert describe_code({"_target_": "mergekit_lab.merging.TIES"}) == {}


def test_a_side_input_that_no_run_makes_is_refused_by_name(module) -> None:
    module(1)
    node = OmegaConf.create({"_target_": "my_own_code.ReadsMine"})
    with pytest.raises(InputError, match="ReadsMine reads mine"):
        build_mergers({"mine": node}, Search(coefficients=[1.0]), ["digits"])
