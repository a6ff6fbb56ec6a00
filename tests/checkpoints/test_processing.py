"""Settings around a model that a merge takes from the base are named where an expert had others."""

import json
from pathlib import Path

import pytest

from mergekit_lab.checkpoints.processing import describe_processing

CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def write(folder: Path, files: dict) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("file", "own", "theirs", "message"),
    [
        (
            "preprocessor_config.json",
            {"image_mean": [0.5], "size": 224},
            {"image_mean": [0.4], "size": {"height": 224, "width": 224}},
            r"image_mean is [0.4] ([0.5] in the base)",
        ),
        (
            "processor_config.json",
            {"feature_extractor": {"n_fft": 400}},
            {"feature_extractor": {"n_fft": 512}},
            "n_fft",
        ),
        (
            "open_clip_config.json",
            {"preprocess_cfg": {"mean": [0.5]}},
            {"preprocess_cfg": {"mean": [0.4]}},
            "mean is",
        ),
        (
            "processor_config.json",
            {"image_processor": {"size": 224}, "video_processor": {"size": 64}},
            {"image_processor": {"size": 224}, "video_processor": {"size": 32}},
            "video size is [32] ([64] in the base)",
        ),
        ("preprocessor_config.json", {"crop_size": 224, "do_pad": None}, {"crop_size": {"height": 224}}, None),
        ("preprocessor_config.json", {"image_processor_type": "A"}, {"image_mean": [0.5]}, None),
    ],
)
def test_other_images_and_sounds_are_named(file, own, theirs, message, tmp_path) -> None:
    base, expert = write(tmp_path / "base", {file: own}), write(tmp_path / "x", {file: theirs})
    notes = describe_processing(base, {"x": expert, "same": base, "in memory": None})
    assert [message in note for note in notes] == ([True] if message else [])


def test_processors_in_one_file_or_in_two_are_the_same(tmp_path) -> None:
    parts = {"image_processor": {"size": 224}, "video_processor": {"size": 64}}
    base = write(
        tmp_path / "base",
        {f"{video}preprocessor_config.json": {"size": size} for video, size in (("", 224), ("video_", 64))},
    )
    expert = write(tmp_path / "x", {"processor_config.json": parts})
    assert describe_processing(base, {"x": expert}) == []


def test_another_pooling_is_named_and_one_that_the_base_lacks(tmp_path) -> None:
    base = write(tmp_path / "base", {"modules.json": MODULES, "1_Pooling/config.json": MEAN})
    same = write(
        tmp_path / "same", {"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode": "mean"}}
    )
    other = write(tmp_path / "other", {"modules.json": MODULES, "1_Pooling/config.json": CLS})
    plain = write(tmp_path / "plain", {"config.json": {}})
    (note,) = describe_processing(base, {"same": same, "other": other, "plain": plain})
    assert note.startswith("warning: other was")
    assert "pooling is 'cls' ('mean' in the base)" in note
    (note,) = describe_processing(plain, {"other": other})
    assert "pooling: cls), and the base is none" in note
