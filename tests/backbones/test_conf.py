"""Every backbone configuration states every field and names an architecture and weights that exist."""

from dataclasses import fields
from pathlib import Path

import open_clip
import pytest
import yaml
from hydra.utils import get_class

from mergekit_lab.backbones.clip_weights import REPOSITORIES, ClipWeights, register_architecture

CONF = Path(__file__).resolve().parents[2] / "conf" / "backbone"
FILES = [path for path in sorted(CONF.glob("*.yaml")) if "backbones.OpenClip" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_backbone_file_states_every_field_and_known_names(path):
    content = yaml.safe_load(path.read_text())
    made = get_class(content.pop("_target_"))(**content)
    assert set(content) == {field.name for field in fields(made)} - {"keep"}
    tags = open_clip.list_pretrained_tags_by_model(register_architecture(made.architecture))
    assert made.weights in tags or made.weights == "asset:glyph_clip"


@pytest.mark.parametrize(("name", "repository"), REPOSITORIES.items())
def test_the_repositories_that_are_known_without_open_clip_are_open_clips(name, repository):
    tag = ClipWeights(*name).tag()
    assert tag["hf_hub"] == f"{repository}/"
    assert tag.get("quick_gelu", False) == (name[1] == "openai")
