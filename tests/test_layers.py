"""Rooms import only what stands to their left; heavy frameworks stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mergekit_lab"
LEFT_TO_RIGHT = [
    {"console", "errors", "machine", "owners", "paths"},
    {"scratch", "workers"},
    {"checkpoints"},
    {"merging", "optim", "tasks"},
    {"backbones", "curvature"},
    {"training", "evaluation"},
    {"analysis"},
    {"store", "reporting"},
    {"schema"},
    {"commands"},
    {"runs"},
    {"__main__"},
]
BESIDE = {
    "store": {"errors", "owners", "paths", "checkpoints"},
    "reporting": {"errors", "paths"},
}
ONLY_IN = {
    "lightning": {"training", "runs"},
    "hydra": {"__main__", "schema", "commands", "runs"},
    "omegaconf": {"__main__", "schema", "commands", "runs"},
    "open_clip": {"backbones"},
    "peft": {"backbones"},
    "transformers": {"backbones", "tasks", "training"},
    "wandb": {"reporting"},
    "wandb_workspaces": {"reporting"},
    "torchmetrics": {"tasks"},
}
HEAVY = ("lightning", "transformers", "open_clip", "wandb", "hydra", "datasets", "peft")


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= (
                {f"{node.module}.{a.name}" for a in node.names}
                if node.module == "mergekit_lab"
                else {node.module}
            )
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_room_may(file: Path) -> None:
    here = room(file)
    level = {name: depth for depth, names in enumerate(LEFT_TO_RIGHT) for name in names}
    assert here in level or here == "__init__", f"{here} has no place in the order of rooms"
    for module in imports(file):
        top, *rest = module.split(".")
        if top == "mergekit_lab" and rest and rest[0] != here and here != "__init__":
            allowed = BESIDE.get(here) or {n for n in level if level[n] < level[here]}
            assert rest[0] in allowed or rest[0] == "__version__", f"{here} may not import {module}"
        if top in ONLY_IN:
            assert here in ONLY_IN[top], f"{top} may be imported only in {ONLY_IN[top]}"


def test_wandb_stands_in_files_that_are_named_for_it() -> None:
    users = [f for f in PACKAGE.rglob("*.py") if any(m.startswith("wandb") for m in imports(f))]
    assert users
    assert all(f.name.startswith("wandb_") for f in users)


@pytest.mark.parametrize(
    "module", ["mergekit_lab", "mergekit_lab.merging", "mergekit_lab.optim", "mergekit_lab.tasks"]
)
def test_importing_a_light_module_loads_no_framework(module: str) -> None:
    script = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
