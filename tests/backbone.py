"""A tenth of the shipped model, for tests that do not ask how good it is: `data/glyph_clip/make.py` made it."""

import json
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from safetensors.torch import load_file, save_file

_NAME = "glyph_clip"
_SMALL = Path(__file__).parent / "data" / _NAME


def write_small(folder: Path) -> Path:
    """The small model's weights, with the shipped one's text tower."""
    from mergekit_lab.backbones import clip_weights

    shipped = load_file(clip_weights._ASSETS / f"{_NAME}.safetensors")
    text = {name: value for name, value in shipped.items() if not name.startswith("visual.")}
    save_file(text | load_file(_SMALL / "visual.safetensors"), folder / f"{_NAME}.safetensors")
    return folder


def make_small(folder: Path) -> ExitStack:
    """Until this is closed, `glyph-clip` has an image tower of 0.1 M parameters, which `write_small` wrote."""
    from open_clip import factory

    from mergekit_lab.backbones import clip_weights
    from mergekit_lab.backbones.open_clip import make_whole_model

    config = json.loads((_SMALL / f"{_NAME}.json").read_text())
    until = ExitStack()
    make_whole_model.cache_clear()
    until.callback(make_whole_model.cache_clear)
    until.enter_context(patch.object(clip_weights, "_ASSETS", folder))
    until.enter_context(patch.dict(factory._MODEL_CONFIGS, {_NAME: config}))
    return until
