"""What docs/installing.md says of a light install, and of extras, is so."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/installing.md").read_text()

MERGE = """
import runpy, sys
from importlib.metadata import packages_distributions

allowed, arguments = set(sys.argv[1].split(",")), sys.argv[2:]
spell = lambda name: name.lower().replace("_", "-")
owners = {module: set(map(spell, names)) for module, names in packages_distributions().items()}
del owners["hydra_plugins"]  # the others' plugins are there, and what they import is not


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if not owners.get(name.partition(".")[0], allowed) & allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
sys.argv = ["mergekit_lab", *arguments]
runpy.run_module("mergekit_lab", run_name="__main__")
"""


def with_what_they_need(names: set[str]) -> set[str]:
    """Packages and all that pip installs with them, here."""
    installed: set[str] = set()
    while names:
        installed |= names
        needed = [Requirement(text) for name in names for text in requires(name) or ()]
        wanted = {n.name for n in needed if n.marker is None or n.marker.evaluate({"extra": ""})}
        names = {name.lower().replace("_", "-") for name in wanted} - installed
    return installed


def test_a_merge_runs_with_what_the_page_installs(tmp_path: Path) -> None:
    (line,) = re.findall(r"^pip install (torch numpy .*)$", PAGE, re.M)
    named = {Requirement(each).name for each in shlex.split(line)}
    base = {"w": torch.randn(8, 8), "b": torch.randn(8)}
    for name in ("base", "one", "two"):
        save_file({k: v + len(name) for k, v in base.items()}, tmp_path / f"{name}.safetensors")
    done = subprocess.run(
        [
            *(sys.executable, "-c", MERGE),
            ",".join({"mergekit-lab", *with_what_they_need(named)}),
            *("+experiment=merge_checkpoints", "merger=average", "base=base.safetensors"),
            *("experts=[one.safetensors,two.safetensors]", "out=out"),
        ],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hydra_plugins.mergekit_lab" not in done.stderr  # Hydra would say that a plugin of ours is broken
    (merged,) = (tmp_path / "out").glob("*.safetensors")
    torch.testing.assert_close(load_file(merged)["b"], base["b"] + 3)


def test_the_page_names_every_extra_and_every_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = PAGE.split("## What does an extra add?")[1].split("##")[0]
    assert set(re.findall(r"`(\w+)`", extras)) == set(project["optional-dependencies"])
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert f"| {', '.join(pythons)} | supported |" in PAGE
