"""A run and the commands: which configuration is read, and that it takes its own keys alone."""

import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from composing import compose_config, split_arguments
from omegaconf import OmegaConf, open_dict
from programs import run_program, start_program

from mergekit_lab import InputError, programs
from mergekit_lab.command_line import translate
from mergekit_lab.commands import COMMANDS, find_command_class, refuse_unset
from mergekit_lab.programs import load_torch_ahead, start
from mergekit_lab.schema.check import check_against
from mergekit_lab.schema.run import Main

SCHEMAS = {"run": Main, **{name: find_command_class(name) for name in COMMANDS}}
KEYS = {name: [field.name for field in fields(schema)] for name, schema in SCHEMAS.items()}


@cache
def compose_program(program: str):
    return compose_config([] if program == "run" else [f"+experiment={program}"])[0]


@pytest.mark.parametrize("program", SCHEMAS)
def test_a_program_refuses_the_keys_of_the_others_by_name(program: str) -> None:
    for key in sorted({key for keys in KEYS.values() for key in keys} - {*KEYS[program]}):
        cfg = compose_program(program).copy()
        with open_dict(cfg):
            cfg[key] = None
        with pytest.raises(InputError, match=f"unknown key '{key}'"):
            check_against(cfg, SCHEMAS[program])


@pytest.mark.parametrize("program", SCHEMAS)
def test_a_programs_file_has_every_key_that_it_reads_and_no_other(program: str) -> None:
    assert set(compose_program(program)) == set(KEYS[program])
    check_against(compose_program(program), SCHEMAS[program])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["+experiment=diagnose", "base=b"], "diagnose"),
        (["base=b", "stage=diagnose"], "diagnose"),
        (["-m", "+experiment=merge_checkpoints", "merger=ties,dare"], "merge_checkpoints"),
        (["+experiment=quickstart", "stage=report"], None),
        (["+experiment=merge_checkpoints,expand"], None),
    ],
)
def test_the_command_line_says_which_configuration_is_read(arguments: list[str], name: str | None) -> None:
    options, overrides = split_arguments(translate(arguments))
    assert options.get("--config-name") == name
    kept = [each for each in arguments if name is None or not each.endswith(f"={name}")]
    assert sorted(overrides) == sorted(kept)


@pytest.mark.parametrize("options", [["--config-dir", "mine"], ["--config-dir=mine"], ["-cd", "mine"]])
def test_an_experiment_of_a_users_folder_may_be_for_a_command(tmp_path, monkeypatch, options) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/own.yaml").write_text("# @package _global_\ncommand: merge_checkpoints\n")
    arguments = translate([*options, "+experiment=own"])
    assert "--config-name=merge_checkpoints" in arguments
    assert "+experiment=own" in arguments


def test_a_command_that_fails_leaves_word_and_its_configuration(tmp_path) -> None:
    cfg, choices = compose_config(["+experiment=expand", "base=nowhere"])
    with pytest.raises(InputError, match="low_rank=<folder of factors>"):
        start(cfg, tmp_path, choices, ["base=nowhere"])
    assert "low_rank" in (tmp_path / "failure.json").read_text()
    assert OmegaConf.load(tmp_path / "config.yaml").base == "nowhere"


@pytest.mark.parametrize("name", ["failure.json", "diagnosis.json"])
def test_what_is_in_a_result_s_way_is_named(tmp_path, name: str) -> None:
    (tmp_path / name).mkdir()

    def work() -> None:
        (tmp_path / name).write_text("{}")

    with (
        pytest.raises(InputError, match=rf"{name} cannot be written \(Is a directory\): move it away"),
        programs.leave_failures(OmegaConf.create({}), tmp_path, []),
    ):
        work()


def test_a_variable_that_is_not_set_is_named(tmp_path) -> None:
    arguments = ["base=b", "experts=[a]", "out=out", "merger=ties", "merger._target_=${oc.env:NOPE}"]
    run = run_program(tmp_path, "+experiment=merge_checkpoints", *arguments)
    assert run.returncode == 1
    assert run.stderr.startswith("the configuration does not resolve: KeyError")
    refuse_unset(OmegaConf.create({"command": "diagnose", "base": "${oc.env:NOPE}", "experts": ["a"]}))


def test_a_working_folder_that_was_deleted_is_named(tmp_path) -> None:
    lines = "import os, sys\nfrom mergekit_lab.__main__ import run\nos.rmdir(os.getcwd())\nrun()"
    (tmp_path / "gone").mkdir()
    ended = start_program(tmp_path / "gone", "stage=store", code=lines).wait()
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("the working folder was deleted")


@pytest.mark.skipif(
    sys.platform != "linux" or Path("/proc/driver/nvidia").exists(), reason="torch loads its libraries itself"
)
def test_torchs_libraries_are_loaded_ahead_of_its_import() -> None:
    lines = """
import sys
from mergekit_lab.programs import load_torch_ahead
load_torch_ahead().join()
assert "torch" not in sys.modules
assert "/libtorch_python.so" in open("/proc/self/maps").read()"""
    subprocess.run([sys.executable, "-c", lines], check=True)
    assert load_torch_ahead() is None  # here it is imported


def test_a_program_that_ends_while_torch_is_loaded_does_not_crash(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "mergekit_lab", "+experiment=missing"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("there is no experiment 'missing'")
