"""A folder gets what a loader needs, and nothing that a link smuggled in."""

import json
import os

import pytest
import torch
from checkpoints.models import make_llama, save

from mergekit_lab import InputError
from mergekit_lab.checkpoints import (
    plan_model_files,
    plan_tokenizer_files,
    write_files,
)
from mergekit_lab.checkpoints.libraries import OPEN_CLIP


def test_a_folder_keeps_what_its_loaders_need(tmp_path) -> None:
    source = save(make_llama(), tmp_path / "source")
    (source / "training_args.bin").write_bytes(b"secret")
    (source / "modeling_mine.py").write_text("")
    (source / "LICENSE").write_text("mine")
    plain = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(plain | {"quantization_config": {"quant_method": "gptq"}}))
    (source / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "out").mkdir()
    write_files(plan_model_files(source, None, torch.float16, 40), tmp_path / "out")
    write_files(plan_tokenizer_files(source), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [
            "LICENSE",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    )
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "float16"
    assert config["vocab_size"] == 40
    assert "quantization_config" not in config


def test_open_clip_is_told_of_a_grown_vocabulary(tmp_path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (source / "config.json").write_text("{}")
    config = {"model_cfg": {"text_cfg": {"vocab_size": 36, "width": 8}}}
    (source / "open_clip_config.json").write_text(json.dumps(config))
    assert [*write_files(plan_model_files(source, OPEN_CLIP, vocabulary=38), out)] == ["open_clip_config.json"]
    copied = json.loads((out / "open_clip_config.json").read_text())["model_cfg"]["text_cfg"]
    assert copied == {"vocab_size": 38, "width": 8}


def test_links_that_a_user_made_are_followed(tmp_path) -> None:
    """`ln -s`, DVC, git-annex and older clients of the hub make such folders."""
    real, source, out = save(make_llama(), tmp_path / "real"), tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for file in real.iterdir():
        (source / file.name).symlink_to(file)
    write_files(plan_model_files(source), out)
    write_files(plan_tokenizer_files(source), out)
    assert not any(file.is_symlink() for file in out.iterdir())
    assert (out / "config.json").read_bytes() == (real / "config.json").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == (real / "tokenizer.json").read_bytes()


def test_links_out_of_the_hubs_cache_are_refused_and_those_into_its_blobs_are_not(tmp_path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    source = tmp_path / "models/snapshots/abc"
    source.mkdir(parents=True)
    (tmp_path / "models/blobs").mkdir()
    (tmp_path / "models/blobs/123").write_text("{}")
    (source / "tokenizer.json").symlink_to("../../blobs/123")
    (tmp_path / "out").mkdir()
    assert list(write_files(plan_tokenizer_files(source), tmp_path / "out")) == ["tokenizer.json"]
    assert not (tmp_path / "out/tokenizer.json").is_symlink()
    (source / "tokenizer_config.json").symlink_to(secret)
    with pytest.raises(InputError, match=r"\(tokenizer_config.json\)"):
        write_files(plan_tokenizer_files(source), tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("tokenizer.model", os.mkfifo, "is a pipe or a device"),
        ("generation_config.json", lambda file: file.symlink_to("nowhere"), "is a link that"),
        ("vocab.txt", lambda file: file.symlink_to("vocab.txt"), "symbolic links"),
        ("LICENSE", lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), "Git LFS"),
        ("modules.json", lambda file: file.write_text('{"a": 1}'), "does not list modules"),
        ("modules.json", lambda file: file.write_text("[" * 100_000), "nested too deep"),
    ],
)
def test_files_that_cannot_be_copied_are_named_before_a_merge(name, make, message, tmp_path) -> None:
    make(tmp_path / name)
    with pytest.raises(InputError, match=f"{name} .*{message}|{name} {message}"):
        [plan_model_files(tmp_path), plan_tokenizer_files(tmp_path)]
