"""The wheel is complete: it runs from another folder, without the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path
from sysconfig import get_path

import pytest
from composing import TINY

ROOT = Path(__file__).parents[2]
ONE_TASK = [*(each for each in TINY if "latin" not in each), "~suite.tasks.latin"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=ROOT, check=True
    )
    return next(out.glob("*.whl"))


def test_the_wheel_holds_configs_weights_and_the_sweeper(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "mergekit_lab/conf/main.yaml",
        "mergekit_lab/conf/experiment/quickstart.yaml",
        "mergekit_lab/assets/glyph_clip.safetensors",
        "mergekit_lab/py.typed",
        "mergekit_lab/reporting/templates/page.html.j2",
        "mergekit_lab/reporting/templates/style.css",
        "mergekit_lab/reporting/templates/page.js",
        "hydra_plugins/mergekit_lab/comparison_sweeper.py",
    ):
        assert needed in names
    assert "hydra_plugins/__init__.py" not in names
    assert not [n for n in names if n.startswith(("tests", "experiments", "docs"))]


@pytest.mark.slow
def test_an_installed_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment that sees this one's packages, but not its editable install."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    site = next((tmp_path / "env/lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)  # all that installing one without scripts is
    (site / "borrowed.pth").write_text(get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "conf").mkdir()  # a folder of that name in the working directory must not be read

    where = subprocess.run(
        [python, "-c", "from mergekit_lab.paths import find_conf_dir; print(find_conf_dir())"],
        capture_output=True, text=True, cwd=elsewhere, check=True,
    )  # fmt: skip
    assert where.stdout.strip().startswith(str(tmp_path / "env"))

    done = subprocess.run(
        [
            *(python, "-m", "mergekit_lab", *ONE_TASK, "merger=average", "joint=false"),
            *("store.root=store", "run_dir=run"),
        ],
        capture_output=True, text=True, cwd=elsewhere,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "is a library's log among what a run says?"
    assert "average" in done.stdout
    assert (elsewhere / "run/report.html").is_file()
    assert (elsewhere / "run/records.jsonl").is_file()
