"""What a configuration may say: types, ranges and targets, each refused by name before anything is called."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, MinLen
from composing import compose_config
from omegaconf import OmegaConf

from mergekit_lab import InputError
from mergekit_lab.merging import DARE, TIES, Method, TaskArithmetic
from mergekit_lab.programs import start
from mergekit_lab.schema.check import build, check_against
from mergekit_lab.schema.run import check
from mergekit_lab.schema.target import Target


@dataclass(frozen=True)
class Group:
    count: Annotated[int, Ge(1)] | None = None
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    way: Literal["grid", "halving"] = "grid"
    pair: tuple[float, float] = (0.0, 1.0)
    names: Annotated[list[str], MinLen(1)] | None = None
    file: Path = Path()
    levels: dict[str, dict[str, float]] | None = None


@dataclass(frozen=True)
class Top:
    group: Group
    merger: Target[Method] | None = None
    mergers: dict[str, Target[Method]] | None = None
    anything: Any = None


def check_text(text: str) -> None:
    check_against(OmegaConf.create(text), Top)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count: 0", "group.count is 0.*1"),
        ("count: true", "group.count is True.*whole number"),
        ("count: 1.0", "group.count is 1.0"),
        ("share: 0", r"group.share is 0; it must be in \(0, 1\]"),
        ("share: 1.5", "group.share is 1.5"),
        ("share: '0.5'", "group.share is '0.5'"),
        ("way: halvin", "group.way is 'halvin'.*'halving'"),
        ("pair: [1, 2, 3]", r"group.pair is \[1, 2, 3\].*tuple\[float, float\]"),
        ("names: []", r"group.names is \[\]"),
        ("names: one", r"group.names is 'one'.*list\[str\]"),
        ("names: {a: b}", "group.names is {'a'.*'b'}"),
        ("file: 3", "group.file is 3.*Path"),
        ("levels: {a: {b: high}}", "group.levels.a.b is 'high'"),
        ("shar: 1", "'group.shar'.*'share'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_text(f"group: {{{text}}}")


def test_what_yaml_writes_another_way_is_taken() -> None:
    check_text("group: {count: null, share: 1, pair: [1, 2.5], file: a/b, levels: {a: {b: 1}}}")
    check_text("{group: {}, anything: {1: [2, {true: 3}]}}")


@pytest.mark.parametrize("number", ["1e308", "-1e39", ".inf", ".nan", "1" + 40 * "0"])
@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("group: {{share: {}}}", "group.share"),
        ("group: {{pair: [0, {}]}}", "group.pair"),
        ("group: {{levels: {{a: {{b: {}}}}}}}", "group.levels.a.b"),
        ("{{group: {{}}, anything: {{x: [{}]}}}}", "anything"),
        (
            "{{group: {{}}, merger: {{_target_: mergekit_lab.merging.TIES, coefficient: {}}}}}",
            "merger.coefficient",
        ),
    ],
)
def test_a_number_that_float32_does_not_hold_is_refused(override: str, name: str, number: str) -> None:
    with pytest.raises(InputError, match=f"{name} is .*; it must be finite"):
        check_text(override.format(number))


@pytest.fixture
def theirs(monkeypatch):
    """A module of a user."""
    module, called = ModuleType("theirs"), []

    class Own(TaskArithmetic):
        pass

    class Untyped(TaskArithmetic):
        def __init__(self, other) -> None:
            called.append("Untyped")

    class Typed(TaskArithmetic):
        def __init__(self, others: Sequence[Method], make: Callable[..., Method]) -> None:
            called.append("Typed")

    class Stranger:
        def __init__(self, *_, **__) -> None:
            called.append("Stranger")

    def make_ties(density: float = 0.2) -> TIES:
        return TIES(density=density)

    def record_call(**_):
        called.append("silent")

    for each in (Own, Untyped, Typed, Stranger, make_ties, record_call):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "theirs", module)
    return called


TIES_NODE = "{_target_: mergekit_lab.merging.TIES}"


@pytest.mark.parametrize(
    "node",
    [
        "{_target_: theirs.Stranger}",
        "{_target_: theirs.record_call}",
        "{_target_: mergekit_lab.merging.factor_method, method: 3}",
        "{_target_: mergekit_lab.checkpoints.make_folder, out: here}",
        "{_target_: mergekit_lab.backbones.Full}",
        "{_target_: subprocess.Popen, args: [ls]}",
        "{_target_: os.remove, path: here}",
        "{_target_: mergekit_lab.merging.DARE, inner: {_target_: theirs.Stranger}}",
        "{_target_: mergekit_lab.merging.DARE, seed: {_target_: theirs.Stranger}}",
        "{_target_: mergekit_lab.merging.TIES, weights: [{_target_: theirs.record_call}]}",
        "{_target_: theirs.Untyped, other: " + TIES_NODE + "}",
        "{_target_: theirs.Typed, others: [{_target_: theirs.Stranger}], make: " + TIES_NODE + "}",
        "{_target_: mergekit_lab.merging.TIES, _args_: [{_target_: theirs.Stranger}]}",
        "{_target_: 3}",
        "{_target_: [a]}",
        "{_target_: }",
        "{_target_: nowhere.at_all}",
    ],
)
def test_a_target_that_makes_something_else_is_refused_before_it_is_called(node: str, theirs) -> None:
    for text in (f"merger: {node}", f"mergers: {{mine: {node}}}"):
        with pytest.raises(InputError, match=r"merger[s.].*_target_|unknown key 'merger.*_args_'"):
            check_text(f"{{group: {{}}, {text}}}")
    with pytest.raises(InputError, match=r"_target_|_args_"):
        build(OmegaConf.create(node), Method)
    assert theirs == []


def test_nothing_is_built_where_nothing_is_declared(theirs) -> None:
    for text in ("anything: {_target_: theirs.Stranger}", "anything: [{x: {_target_: theirs.record_call}}]"):
        with pytest.raises(InputError, match="_target_"):
            check_text(f"{{group: {{}}, {text}}}")
    assert theirs == []


def test_a_users_own_class_and_a_function_that_says_what_it_makes_are_targets(theirs) -> None:
    own = build({"_target_": "theirs.Own", "coefficient": 0.4}, Method)
    assert own.scale == 0.4
    assert build({"_target_": "theirs.make_ties", "density": 0.3}, Method) == TIES(density=0.3)
    nested = {"_target_": "mergekit_lab.merging.DARE", "inner": {"_target_": "theirs.Own"}}
    assert isinstance(build(nested, DARE).inner, TaskArithmetic)
    with pytest.raises(InputError, match=r"'densty'.*'density'"):
        build({"_target_": "theirs.make_ties", "densty": 0.3}, Method)


@pytest.mark.parametrize(
    "lines",
    [
        ["merger._target_=theirs.record_call"],
        ["finetuning._target_=theirs.record_call"],
        ["optimizer.base._target_=theirs.record_call"],
        ["backbone._target_=theirs.record_call"],
        ["suite.tasks.digits._target_=theirs.record_call"],
        ["logger._target_=theirs.record_call"],
        ["analysis._target_=theirs.record_call"],
        ["+search.fields={inner: [{_target_: theirs.record_call}]}"],
        ["+trainer.strategy={_target_: theirs.record_call}"],
        ["experts={a: {_target_: theirs.record_call}}"],
    ],
)
@pytest.mark.parametrize("more", [["dry_run=true"], ["stage=check_data"]])
def test_a_run_calls_nothing_that_its_schema_does_not_name(lines, more, theirs, tmp_path) -> None:
    cfg, choices = compose_config(
        ["merger=dare", "optimizer=sam", f"store.root={tmp_path}/store", *lines, *more]
    )
    with pytest.raises(InputError, match="_target_"):
        start(cfg, tmp_path / "run", choices, [])
    assert theirs == []


def test_a_value_is_shown_in_short() -> None:
    long = "x" * 5000
    with pytest.raises(InputError) as caught:
        check_text(f"group: {{count: [{', '.join(1000 * ['[1, 2]'])}], file: {long}}}")
    assert len(str(caught.value)) < 300
    with pytest.raises(InputError) as caught:
        check_text(f"group: {{way: {long}}}")
    assert len(str(caught.value)) < 300


def test_a_whole_number_is_a_float_where_one_is_declared() -> None:
    cfg = OmegaConf.create({"group": {"count": 1, "share": 1, "pair": [1, 2], "levels": {"a": {"b": 3}}}})
    group = check_against(cfg, Top).group
    assert type(group.count) is int
    assert [type(value) for value in (group.share, *group.pair, group.levels.a.b)] == [float] * 4


def test_a_shipped_run_passes() -> None:
    check(compose_config(["merger=dare", "optimizer=sam"])[0])
