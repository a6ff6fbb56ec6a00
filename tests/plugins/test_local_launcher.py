"""`hydra/launcher=local` and `hydra/sweeper=comparison` do what Hydra asks of them, in any program."""

import subprocess
import sys
import textwrap
from functools import wraps
from pathlib import Path

import pytest
from hydra.core.singleton import Singleton
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.version import VersionBase
from packaging.version import Version

pytestmark = pytest.mark.filterwarnings("ignore:.*Hydra versions:UserWarning")  # the suites name no version
COMPARISON = ["hydra/sweeper=comparison"]
ON_THE_CPU = ["hydra.launcher.devices=[cpu]"]


@pytest.fixture(autouse=True)
def _version_of_the_suites():
    """Other tests name a version of Hydra for their process, with which jobs do not change their folder."""
    before = Singleton.get_state()
    VersionBase.instance().setbase(Version("1.1"))
    yield
    Singleton.set_state(before)


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("local", ON_THE_CPU), ("basic", COMPARISON)],
)
class TestSweeps(LauncherTestSuite):
    pass


@pytest.mark.parametrize(
    ("launcher_name", "overrides"), [("basic", [*COMPARISON, "hydra.sweeper.max_batch_size=2"])]
)
class TestBatches(BatchedSweeperTestSuite):
    pass


def take_last(test):
    """A test of a suite with its last variant alone, which sets what the others do; each is a program."""
    (mark,) = test.pytestmark

    @pytest.mark.parametrize(mark.args[0], mark.args[1][-1:])
    @wraps(test, updated=())
    def run(*arguments, **named) -> None:
        test(*arguments, **named)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=local", *ON_THE_CPU])]
)
class TestPrograms(IntegrationTestSuite):
    test_custom_task_name = take_last(IntegrationTestSuite.test_custom_task_name)
    test_custom_sweeper_run_workdir = take_last(IntegrationTestSuite.test_custom_sweeper_run_workdir)


@pytest.mark.parametrize("sweeper", ["basic", "comparison"])
def test_a_program_s_own_jobs_run_and_one_that_fails_ends_it(tmp_path: Path, sweeper: str) -> None:
    """Not ours, though its configuration has our words; its error is one that does not unpickle."""
    (tmp_path / "config.yaml").write_text("x: 1\ndevice: card\n")
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
        import hydra
        from pathlib import Path

        class Unpicklable(Exception):
            def __init__(self, one, other):
                super().__init__(f"{one} {other}")

        @hydra.main(version_base=None, config_path=".", config_name="config")
        def main(cfg):
            Path(__file__).with_name(f"ran {cfg.x} on a {cfg.device}").touch()
            if cfg.x == 2:
                raise Unpicklable("two is", "wrong")

        if __name__ == "__main__":
            main()
    """)
    )
    command = [sys.executable, "program.py", "-m", "x=1,2,3", "hydra/launcher=local", *ON_THE_CPU]
    command += [f"hydra/sweeper={sweeper}", "hydra.sweep.dir=sweep"]
    earlier = tmp_path / "sweep/training/7/failure.json"  # of a sweep that was killed
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "two is wrong" in ended.stderr
    assert len(list(tmp_path.glob("ran * on a card"))) == 3
    assert earlier.exists() == (sweeper == "basic")
