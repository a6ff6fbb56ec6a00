"""Rooms import only what stands to their left; heavy frameworks stay where they belong."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mergekit_lab"
STUDIES = sorted(f.parent for f in PACKAGE.parent.glob("experiments/*/README.md"))
LEFT_TO_RIGHT = [
    {"console", "digests", "errors", "failure", "machine", "owners", "paths"},
    {"batches", "compiled", "cuda_graphs", "kept_results", "memory", "prefetch", "ranges", "scratch"}
    | {"triton_kernels", "workers", "yaml_files"},
    {"checkpoints"},
    {"merging", "optim", "tasks"},
    {"backbones", "curvature"},
    {"training", "evaluation"},
    {"analysis"},
    {"store", "reporting"},
    {"schema"},
    {"commands"},
    {"runs"},
    {"programs", "command_line"},
    {"from_python", "__main__"},
]
BESIDE = {
    "store": {"digests", "errors", "owners", "paths", "checkpoints"},
    "reporting": {"errors", "paths"},
}
ONLY_IN = {
    "lightning": {"training", "runs"},
    "hydra": {"__main__", "from_python", "programs", "command_line", "schema", "commands", "runs"},
    "omegaconf": {"__main__", "from_python", "programs", "command_line", "schema", "commands", "runs"},
    "open_clip": {"backbones"},
    "peft": {"backbones"},
    "transformers": {"checkpoints", "backbones", "tasks", "training"},
    "vl_convert": {"reporting"},
    "wandb": {"reporting"},
    "wandb_workspaces": {"reporting"},
    "torchmetrics": {"tasks"},
    "lm_eval": {"tasks", "evaluation"},
}
HEAVY = ("lightning", "transformers", "open_clip", "wandb", "hydra", "datasets", "peft")


@cache
def list_imports(file: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= (
                {f"{node.module}.{a.name}" for a in node.names}
                if node.module == "mergekit_lab"
                else {node.module}
            )
    return modules


def name_room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def find_wrong_imports(file: Path) -> Iterator[str]:
    here = name_room(file)
    level = {name: depth for depth, names in enumerate(LEFT_TO_RIGHT) for name in names}
    if here not in level and here != "__init__":
        yield f"{here} has no place in the order of rooms"
        return
    for module in list_imports(file):
        top, *rest = module.split(".")
        if top == "mergekit_lab" and rest and rest[0] != here and here != "__init__":
            allowed = BESIDE.get(here) or {n for n in level if level[n] < level[here]}
            if rest[0] not in allowed and rest[0] != "__version__":
                yield f"{file.relative_to(PACKAGE)} may not import {module}"
        if here not in ONLY_IN.get(top, {here}):
            yield f"{file.relative_to(PACKAGE)} may not import {top}, which is for {ONLY_IN[top]}"


def test_files_import_only_what_their_rooms_may() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 200
    assert [wrong for file in files for wrong in find_wrong_imports(file)] == []


def test_the_page_shows_this_order() -> None:
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    table = page.split("| room |")[1].split("\n\n")[0].splitlines()[2:]
    assert [set(re.findall(r"`(\w+)/?`", row.split("|")[1])) for row in table] == LEFT_TO_RIGHT


def test_tests_import_nothing_private() -> None:
    private = [
        f"{file.name}: {alias.name}"
        for file in Path(__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith(("mergekit_lab", "hydra_plugins"))
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert private == []


def test_wandb_stands_in_files_that_are_named_for_it() -> None:
    users = [f for f in PACKAGE.rglob("*.py") if any(m.startswith("wandb") for m in list_imports(f))]
    assert users
    assert all(f.name.startswith("wandb_") for f in users)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("mergekit_lab, mergekit_lab.merging, mergekit_lab.optim, mergekit_lab.tasks", HEAVY),
        ("mergekit_lab.reporting", ("rich", "vl_convert", "wandb", "torch", "numpy")),
        ("mergekit_lab.runs.entry, mergekit_lab.runs.store, mergekit_lab.runs.compare", ("torch",)),
    ],
)
def test_importing_light_modules_loads_no_framework(modules: str, heavy: tuple[str, ...]) -> None:
    script = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def build_graph(root: Path, package: str = "") -> dict[str, set[str]]:
    """Which module below a folder imports which, wherever in its text the import stands."""
    modules = {}
    for file in root.rglob("*.py"):
        parts = [*package.split(), *file.relative_to(root).with_suffix("").parts]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {name: set(list_targets(name, file, modules)) - {name} for name, file in modules.items()}


def list_targets(name: str, file: Path, modules: dict[str, Path]) -> Iterator[str]:
    room = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = room[: len(room) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for full in (f"{source}.{alias.name}" for alias in node.names):
                if full in modules or source in modules:
                    yield full if full in modules else source


def find_circles(imported: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of modules of which each reaches every other."""
    reached = {name: {name} for name in imported}
    for _ in imported:
        grown = {n: r.union(*(imported[m] for m in r)) for n, r in reached.items()}
        if grown == reached:
            break
        reached = grown
    groups = {tuple(sorted(m for m in r if n in reached[m])) for n, r in reached.items()}
    return sorted(group for group in groups if len(group) > 1)


@pytest.mark.parametrize("root", [PACKAGE, *STUDIES], ids=lambda folder: folder.name)
def test_no_modules_import_each_other_in_a_circle(root: Path) -> None:
    cycles = set(find_circles(build_graph(root, PACKAGE.name if root == PACKAGE else "")))
    assert not cycles, f"circles of imports: {'; '.join(' – '.join(circle) for circle in cycles)}"


def test_a_circle_is_found_within_functions_and_by_relative_names(tmp_path: Path) -> None:
    files = {
        "__init__": "from .one import f",
        "one": "def f():\n    from p import two",
        "two": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import three",
        "three": "import p.one",
        "alone": "from p.one import f",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert find_circles(build_graph(tmp_path, "p")) == [("p.one", "p.three", "p.two")]
