"""Examples and links of the documentation work."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/mergers.md",
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
    page for places in ("*.md", "docs/*.md", "experiments/*/README.md") for page in sorted(ROOT.glob(places))
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
