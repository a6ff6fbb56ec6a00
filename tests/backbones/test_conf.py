"""Every backbone configuration states every field and names an architecture and weights that exist."""

import inspect
from dataclasses import fields
from pathlib import Path

import open_clip
import pytest
import yaml
from hydra.utils import get_class

from mergekit_lab import backbones
from mergekit_lab.backbones.clip_weights import REPOSITORIES, ClipWeights, register_architecture

ROOT = Path(__file__).resolve().parents[2] / "conf"
CONF = ROOT / "backbone"
FILES = [path for path in sorted(CONF.glob("*.yaml")) if "backbones.OpenClip" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_backbone_file_states_every_field_and_known_names(path):
    content = yaml.safe_load(path.read_text())
    backbone = get_class(content.pop("_target_"))(**content)
    assert set(content) == {field.name for field in fields(backbone)} - {"keep"}
    tags = open_clip.list_pretrained_tags_by_model(register_architecture(backbone.architecture))
    assert backbone.weights in tags or backbone.weights == "asset:glyph_clip"


@pytest.mark.parametrize(("name", "repository"), REPOSITORIES.items())
def test_the_repositories_that_are_known_without_open_clip_are_open_clips(name, repository):
    tag = ClipWeights(*name).find_tag()
    assert tag["hf_hub"] == f"{repository}/"
    assert tag.get("quick_gelu", False) == (name[1] == "openai")


@pytest.mark.parametrize(
    ("base_class", "group"), [(backbones.Backbone, "backbone"), (backbones.Parametrization, "finetuning")]
)
def test_every_kind_is_exported_and_has_a_configuration(base_class: type, group: str) -> None:
    targets = "".join(path.read_text() for path in (ROOT / group).glob("*.yaml"))
    for cls in base_class.__subclasses__():
        if cls.__module__.startswith("mergekit_lab.") and not inspect.isabstract(cls):
            assert cls.__name__ in backbones.__all__, f"{cls.__name__} is no name of mergekit_lab.backbones"
            target = f"mergekit_lab.backbones.{cls.__name__}\n"
            assert target in targets, f"{cls.__name__} has no file in conf/{group}"


def test_the_page_lists_every_backbone() -> None:
    page = (ROOT.parent / "docs" / "backbones.md").read_text()
    for path in CONF.glob("*.yaml"):
        name = path.stem.removesuffix("_float32")
        assert f"`{name}`" in page, f"{name} is missing in docs/backbones.md"
