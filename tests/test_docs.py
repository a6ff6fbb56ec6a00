"""Examples and links of the documentation work."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from composing import compose_config
from omegaconf import OmegaConf

from mergekit_lab.merging import TIES, Method, TaskArithmetic
from mergekit_lab.schema.check import build
from mergekit_lab.schema.target import without_null_coefficient

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/mergers.md",
        "docs/add_merger.md",
        "docs/merging_checkpoints.md",
        "docs/curvature.md",
        "docs/finetuning.md",
        "docs/backbones.md",
    ],
)
def test_the_examples_of_a_page_run(page: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "__example__"})


PAGES = [
    page for pattern in ("*.md", "docs/*.md", "experiments/*/README.md") for page in sorted(ROOT.glob(pattern))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_and_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_links_and_pictures_of_the_readme_work_on_pypi() -> None:
    resolve_links = runpy.run_path(str(ROOT / "hatch_build.py"))["resolve_links"]
    readme = (ROOT / "README.md").read_text()
    filled, left_open = resolve_links(readme, "https://host/us/it/blob/v1"), resolve_links(readme, None)
    for text in (filled, left_open):
        assert all("://" in target for target in re.findall(r"\]\(([^)\s]+)", text))
    assert "(https://host/us/it/raw/v1/docs/images/quickstart.png)" in filled
    assert "(https://host/us/it/blob/v1/docs/mergers.md)" in filled
    assert "[mergers]" not in left_open


def test_the_commands_beside_mergekits_methods_take_their_inner_method() -> None:
    page = (ROOT / "docs/mergekit.md").read_text()
    inner = {"dare_linear": TaskArithmetic, "dare_ties": TIES, "della": TIES, "della_linear": TaskArithmetic,
             "breadcrumbs": TaskArithmetic, "breadcrumbs_ties": TIES}  # fmt: skip
    for names, commands in re.findall(r"^\| (`(?:dare|della|bread).*?`) \| (.*?) \|$", page, re.M):
        for name, command in zip(names.split(", "), commands.split("; "), strict=True):
            cfg, _ = compose_config(["+experiment=merge_checkpoints", *shlex.split(command.strip("`"))])
            content, _ = without_null_coefficient(OmegaConf.to_container(cfg.merger, resolve=True))
            assert type(build(content, Method).inner) is inner.pop(name.strip("`"))
    assert not inner


def test_the_study_of_when_training_helps_says_what_its_results_say(monkeypatch) -> None:
    """Its tables are those of analyze.py; rows with a deviation stand in the README as they are there, and what
    fresh seeds say is counted there."""
    folder = ROOT / "experiments/when_it_helps"
    monkeypatch.syspath_prepend(folder)
    for name in ("analyze", "cells", "study"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from analyze import read, report

    lines = [line for path in sorted(folder.glob("results/*.jsonl")) for line in read(path)]
    text = report(lines)
    rows = text.splitlines()
    pages = [(folder / name).read_text() for name in ("README.md", "results/tables.md")]
    readme, tables = (
        [row for row in page.splitlines() if row.startswith("|") and "±" in row] for page in pages
    )
    assert len(readme) > 20
    assert set(readme) | set(tables) <= set(rows)
    fresh = text[text.index("## Fresh seeds") : text.index("## Seconds")]
    assert fresh in pages[1]
    counts = re.findall(
        r"^(\w+), main arms: of (\d+) stars (\d+) .* (\d+) are beyond chance again", fresh, re.M
    )
    assert len(counts) == 2
    for count in counts:
        assert "| {}, main | {} | {} | {} |".format(*count) in pages[0]
