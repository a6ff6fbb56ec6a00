import shlex

import pytest
from hydra import compose, initialize_config_dir

from mergekit_lab.paths import find_conf_dir
from mergekit_lab.reporting import Origin

MERGERS = ("average", "task_arithmetic", "ties", "dare", "fisher", "tsvm", "epimer")


def make_command(record, *arguments, mergers=MERGERS, **changes):
    return (
        Origin(arguments, "now")
        .make_command(record(**changes), mergers)
        .removeprefix("python -m mergekit_lab ")
    )


@pytest.mark.parametrize("kind", ["merged", "expert", "joint"])
def test_a_row_s_command_makes_that_row_and_no_other_merge(record, kind):
    arguments = (
        "+experiment=quickstart",
        "mergers.ties.density=0.3",
        "joint=true",
        "run_dir=/x",
        "stage=report",
    )
    overrides = shlex.split(make_command(record, *arguments, kind=kind))
    with initialize_config_dir(str(find_conf_dir()), version_base="1.3"):
        cfg = compose("main", overrides)
    assert list(cfg.mergers) == (["ties"] if kind == "merged" else [])
    assert cfg.joint == (kind == "joint")
    assert "/x" not in str(cfg.run_dir)
    if kind == "merged":
        assert cfg.mergers.ties.density == 0.3


def test_a_row_s_command_keeps_a_picked_merger_and_a_label_that_overrides_cannot_name(record):
    assert make_command(record, "merger=ties", "seed=2") == "merger=ties seed=2 joint=false"
    odd = make_command(record, "+experiment=mine", mergers=("ties", "ties at 0.3"))
    assert odd == "+experiment=mine joint=false"
