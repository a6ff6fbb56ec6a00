"""Every configuration composes, names what exists, and takes no key that nothing reads."""

import json
import re
from itertools import zip_longest

import pytest
from composing import compose_config, to_plain
from omegaconf import OmegaConf

from mergekit_lab import InputError
from mergekit_lab.merging import Method
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.runs.settle import settle
from mergekit_lab.schema.check import build, check_against
from mergekit_lab.schema.run import Main, check, make_optimizer_factory
from mergekit_lab.schema.stages import STAGES, check_stages

GROUPS = [
    *("backbone", "suite", "finetuning", "optimizer", "training", "curvature"),
    *("search", "analysis", "logger", "store"),
]


def list_options(group: str) -> list[str]:
    return [file.stem for file in sorted((find_conf_dir() / group).glob("*.yaml"))]


ROWS = [
    {group: option for group, option in zip(GROUPS, row, strict=True) if option}
    for row in zip_longest(*map(list_options, GROUPS))
]
"""One option of each group, until the longest group ends: none depends on another's."""
ROWS += [{"trainer": option} for option in list_options("trainer")]
ROWS += [{f"merger@mergers.{option}": option for option in list_options("merger")}]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values())[:80])
def test_every_option_composes_and_every_target_takes_its_keys(row: dict[str, str]) -> None:
    named = ["backbone.source=org/name"] if row.get("backbone", "").startswith("hf_") else []
    taken = [f"{'+' if '@' in group else ''}{group}={option}" for group, option in row.items()]
    cfg, choices = compose_config([*taken, *named])
    check(settle(cfg))
    assert choices.items() >= row.items()


def test_every_experiment_says_its_question_its_command_and_its_cost() -> None:
    """That it composes and runs is shown by the test of its stage, of its kind of models, or of the demo."""
    heads = {f.stem: f.read_text()[:1200] for f in (find_conf_dir() / "experiment").glob("*.yaml")}
    lines = ("# Question:", "# Cost:")
    assert [name for name, head in heads.items() if not all(line in head for line in lines)] == []
    commands = {
        name: re.search(rf"python -m mergekit_lab (-m )?\+experiment={name}(?!\w)", heads[name])
        for name in heads
    }
    assert [name for name, command in commands.items() if not command] == []


@pytest.mark.parametrize("option", list_options("optimizer"))
def test_every_optimizer_configuration_builds_from_named_parameters(option: str, encoder) -> None:
    every = [f"+optimizer@optimizer_of.{option}={option}" for option in list_options("optimizer")]
    make = make_optimizer_factory(compose_config(every)[0].optimizer_of[option], steps=100)
    optimizer = make(list(encoder.named_parameters()))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-4)


def test_the_command_line_wins_over_an_experiment_in_its_own_groups() -> None:
    cfg, choices = compose_config(["+experiment=vit_b32_saft", "optimizer=sam", "training.steps=5"])
    assert choices["optimizer"] == "sam"
    assert cfg.training.steps == 5
    assert compose_config(["+experiment=vit_b32_saft"])[0].training.steps == 8000


def test_a_merger_on_the_command_line_replaces_the_experiments_list(tmp_path) -> None:
    from mergekit_lab.runs.run import Run

    cfg, choices = compose_config(
        ["+experiment=quickstart", "merger=ties", "merger.preset=mergekit", "store.root=s"]
    )
    check(cfg)
    mergers = Run(cfg, tmp_path, choices).mergers
    assert list(mergers) == ["ties"]
    assert mergers["ties"].method.preset == "mergekit"
    assert mergers["ties"].searched
    cfg, choices = compose_config(["merger=ties", "merger.coefficient=0.4", "store.root=s"])
    fixed = Run(cfg, tmp_path, choices).mergers["ties"]
    assert not fixed.searched
    assert fixed.method.coefficient == 0.4
    cfg, choices = compose_config(["merger=task_arithmetic", "search=none", "store.root=s"])
    default = Run(cfg, tmp_path, choices).mergers["task_arithmetic"]
    assert not default.searched
    assert default.method.coefficient == 0.3


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("+training.warmup=3", "'training.warmup'.*'warmup_steps'"),
        ("+merger.densty=0.5", "'merger.densty'.*'density'"),
        ("+optimizer.base.lrr=1", "'optimizer.base.lrr'.*'lr'"),
        ("+suite.tasks.digits.size=1", "'suite.tasks.digits.size'"),
        ("+sede=1", "'sede'.*'seed'"),
        ("+trainer.acelerator=cpu", "'trainer.acelerator'.*'accelerator'"),
        ("+trainer.limit_train_batches=3", "'trainer.limit_train_batches'"),
        ("trainer.processes=2", "trainer=ddp"),
        ("mergers=ties", "mergers is 'ties'"),
        ("+suite.tasks.foo=digits", r"suite.tasks is .*; it must be|suite.tasks.foo is 'digits'; it must be"),
        ("trainer.accelerator=cdua", "trainer.accelerator is 'cdua'.*'cuda'"),
        ("store.older_than=nan", "store.older_than"),
        ("store.root=5", "store.root is 5"),
        ("stage=null", "stage is None"),
        ("search.coefficients=0.5", "search.coefficients is 0.5"),
        ("search.coefficients=[inf]", "must be finite"),
        ("evaluation_batch_size=0", "evaluation_batch_size is 0.*least 1"),
        ("seed=9223372036854775808", "seed is 9223372036854775808.*below 9223372036854775808"),
        ("images_limit_gb=-1", "images_limit_gb is -1.*least 0"),
        ("images_limit_gb=nan", "images_limit_gb"),
        ("runs=[]", r"runs is \[\]; it must be a list with something in it, or null"),
        ("runs=1.5", "runs is 1.5"),
        ("runs={a:1}", "runs is {'a'.*1}"),
        ("training.lr=nan", "training.lr is nan"),
        ("optimizer.base.betas=[0.9,1.5]", "optimizer.*Invalid"),
        ("optimizer.base.lr=3e38", "lr is 3e.38.*1e.30"),
        ("optimizer._partial_=3", "optimizer.*<class 'int'>$"),
        ("optimizer.base.betas=[]", r"optimizer.base.betas is \[\]"),
        ("optimizer.base.lr=abc", "optimizer.base.lr is 'abc'"),
        ("optimizer.base.weight_decay=inf", "optimizer.base.weight_decay"),
        ("optimizer.rho=null", "optimizer.rho is None"),
        ("merger.density=[0.1]", r"merger.density is \[0.1\]"),
        ("backbone=hf_causal", "backbone.source is None"),
        ("training.clip_norm=nan", "training.clip_norm"),
        ("training.steps=many", "training.steps is 'many'"),
        ("training.steps=0", "training.steps is 0.*least 1"),
        ("training.precision=16-mixed", "fp16"),
        ("curvature.samples=0", "curvature.samples is 0"),
        ("+finetuning.parametrization=full", "unknown key 'finetuning.parametrization'"),
        ("joint=maybe", "joint is 'maybe'"),
        ("merger._target_=mergekit_lab.merging.TEIS", r"merger\._target_"),
        ("training.lr=${nowhere}", "does not resolve"),
        ("objective=normalised", "objective is 'normalised'.*'normalized'"),
        ("published=[saft C33]", "saft has no table 'C33'"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(override: str, match: str) -> None:
    cfg, _ = compose_config(["merger=ties", "optimizer=sam", override])
    with pytest.raises(InputError, match=match):
        check(cfg)


def test_whole_numbers_enter_keys_as_what_they_are_read_as() -> None:
    """Else `density=1` and `density=1.0` would be merged, and trained, twice."""

    def settle_plainly(one: str) -> dict:
        keys = ["training.lr", "optimizer.rho", "optimizer.base.eps", "finetuning.alpha"]
        keys += ["merger.density", "merger.coefficient"]
        overrides = [f"++{name}={one}" for name in keys] + [f"search.coefficients=[{one},2.5]"]
        kinds = ["optimizer=sam", "finetuning=lora", "merger=ties", "training.steps=1", "run_dir=run"]
        cfg, _ = compose_config([*kinds, *overrides])
        settled_config = check_against(cfg, Main)
        assert OmegaConf.is_struct(settled_config) == OmegaConf.is_struct(cfg)
        assert OmegaConf.is_interpolation(settled_config.optimizer.base, "lr")
        return to_plain(settled_config)

    config = settle_plainly("1")
    assert json.dumps(config) == json.dumps(settle_plainly("1.0"))
    assert type(config["training"]["steps"]) is type(config["finetuning"]["rank"]) is int
    assert config["optimizer"]["base"]["lr"] == config["training"]["lr"] == 1.0


def test_an_analysis_that_comes_last_is_checked_before_the_first_stage() -> None:
    lines = ["stage=[finetune,analyze]", "analysis=landscape", "analysis.samples=0"]
    with pytest.raises(InputError, match=r"analysis\.samples is 0.*1"):
        check(compose_config(lines)[0])


def test_runs_that_are_started_in_the_same_second_have_a_folder_each() -> None:
    first, second = (compose_config([])[0].run_dir for _ in range(2))
    assert first != second


def test_an_objective_is_refused_where_nothing_is_merged() -> None:
    with pytest.raises(InputError, match=r"objective=value .*set merger=NAME"):
        check(compose_config(["objective=value"])[0])


def test_a_methods_own_complaint_comes_through() -> None:
    cfg, _ = compose_config(["merger=ties", "merger.density=2"])
    with pytest.raises(InputError, match=r"density is 2.*\(0, 1\]"):
        build(cfg.merger, Method)


def test_stages_are_listed_in_short_and_long_form() -> None:
    cfg, _ = compose_config([])
    assert check_stages(cfg) == [name for name in STAGES if name != "analyze"]
    assert check_stages(compose_config(["stage=report"])[0]) == ["report"]
    with pytest.raises(InputError, match=r"'marge'.*'merge'"):
        check_stages(compose_config(["stage=marge"])[0])


def test_values_of_a_composed_configuration_are_plain() -> None:
    assert to_plain(compose_config(["+experiment=quickstart"])[0])["seed"] == 0
