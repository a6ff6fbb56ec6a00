"""What Hydra complains of becomes one line with the nearest name."""

import re

import pytest
from composing import compose_config
from hydra.errors import HydraException

from mergekit_lab import InputError
from mergekit_lab.command_line import answer, check_config_files, explain, translate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+experiment=quikstart"], "'quikstart'.*'quickstart'"),
        (["+experiment=merge_checkpoint"], "'merge_checkpoints'"),
        (["merger=tiess"], "merger 'tiess'.*'ties'"),
        (["optimizer=adamww"], "optimizer 'adamww'.*'adamw'"),
        (["+experiment=merge_checkpoints", "merger=tiess"], "did you mean 'ties'"),
        (["training.step=20"], "'training.step'.*'steps'"),
        (
            ["optimizer=sam", "optimizer.base.learning=1"],
            "'optimizer.base.learning'.*lr",
        ),
        (["optimzer=sam"], "'optimzer'.*'optimizer'"),
        (["sede=1"], "'sede'.*'seed'"),
        (["hydra/launcher=rey"], r"no hydra/launcher 'rey'.*mergekit_lab\[launchers\]"),
        (["trainig.lr=1"], "'trainig.lr'; did you mean 'training'"),
        (["merger=dare", "merger.coefficient=1"], "did you mean 'merger.inner.coefficient'"),
        (["merger.coefficient=1"], "choose one first, merger=NAME"),
        (["+experiment=merge_checkpoints", "joint=false"], "unknown key 'joint'"),
    ],
)
def test_a_mistyped_name_is_one_line_with_the_nearest_one(arguments: list[str], message: str) -> None:
    with pytest.raises(HydraException) as caught:
        compose_config(arguments)
    line = explain(caught.value)
    assert re.search(message, line)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        (["+experiment=saft_figure1", "suite=glyphs8"], ["+shipped=planes"]),
        (["suite=glyphs8", "+experiment=saft_figureC2"], ["+shipped=trained"]),
        (["+experiment=saft_figure1", "suite=glyphs8", "+shipped=pairs"], []),
        (["+experiment=saft_figure1"], []),
        (["+experiment=quickstart", "suite=glyphs8"], []),
    ],
)
def test_a_papers_figure_on_glyphs_gets_what_it_names(arguments: list[str], added: list[str]) -> None:
    assert translate(arguments) == [*arguments, *added]


@pytest.mark.parametrize("argument", ["merger=", "+merger@mergers.mine=", "+experiment="])
def test_a_group_left_empty_lists_its_options(argument: str) -> None:
    option = "merge_checkpoints" if "experiment" in argument else "task_arithmetic"
    assert option in str(answer([argument]))
    assert option in str(answer([argument, "--config-dir", "D"]))
    for command in (["seed=1", argument], ["--config-name=mine", argument]):
        with pytest.raises(SystemExit, match=option):
            answer(command)


@pytest.mark.parametrize("name", ["quickstart", "merge_checkpoints"])
def test_the_plus_before_experiment_may_be_left_out(name: str) -> None:
    assert translate([f"experiment={name}", "seed=1"]) == translate([f"+experiment={name}", "seed=1"])


@pytest.mark.parametrize("options", [["--config-name=mine"], ["--config-dir", "D", "-cn", "mine"]])
def test_a_main_configuration_of_ones_own_may_hold_the_experiment(options: list[str]) -> None:
    assert translate(["experiment=quickstart", *options]) == ["experiment=quickstart", *options]


def test_settings_may_follow_options() -> None:
    mixed = [
        "-m",
        "+experiment=mine",
        "--config-dir",
        "D",
        "--info",
        "plugins",
        "seed=1",
        "--cfg=job",
        "joint=false",
    ]
    settings = ["+experiment=mine", "seed=1", "joint=false"]
    assert translate(mixed) == [*settings, "-m", "--config-dir", "D", "--info", "plugins", "--cfg=job"]
    assert translate(["--info", "seed=1"]) == ["seed=1", "--info"]


@pytest.mark.parametrize(
    "written", ["--config-dir={}", "hydra.searchpath=[file://{}]", "hydra.searchpath=[{}]"]
)
@pytest.mark.parametrize("nested", [True, False], ids=["bomb", "circle"])
def test_aliases_that_would_fill_the_memory_are_refused_before_hydra_writes_them_out(
    tmp_path, written: str, nested: bool
) -> None:
    lines = [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(9)]
    bomb = "\n".join(["a0: &a0 [x]", *lines]) if nested else "a: &a\n  b: *a\n"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/fine.yaml").write_text("a: &a {lr: 1.0}\nb: {<<: *a, c: [*a, *a]}\n")
    check_config_files([written.format(tmp_path)])
    (tmp_path / "experiment/bomb.yaml").write_text(bomb)
    with pytest.raises(InputError, match=r"bomb.yaml.*than 20000 values"):
        check_config_files([written.format(tmp_path)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 1000 + "]" * 1000, "x.yaml is nested too deep"),
        ("{" * 100_000, "x.yaml is nested too deep"),
        ("\ufeff# @package _global_\na: 1\n", "x.yaml.*byte-order"),
    ],
    ids=["lists", "cut short", "mark"],
)
def test_what_hydra_would_choke_on_is_refused_by_the_file_s_name(tmp_path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        check_config_files([f"--config-dir={tmp_path}"])
