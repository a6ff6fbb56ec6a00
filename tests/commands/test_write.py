"""Merges and adapters on the hub, for which a server on this machine stands in."""

import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from composing import merge_command
from hub_server import READER, TOKEN, holds, serve
from huggingface_hub import ModelCard, constants
from language import save_tiny
from safetensors.torch import load_file, save_file

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import check_push

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the hub client's


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A tiny Llama, and a fine-tuned one."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "base", "llama")
    weights = load_file(save_tiny(folder / "expert", "llama") / "model.safetensors")
    torch.manual_seed(1)
    weights = {n: t + 0.1 * torch.randn_like(t) if t.dim() == 2 else t for n, t in weights.items()}
    save_file(weights, folder / "expert/model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Where the repositories are; who is asked has a token."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve(tmp_path / "hub", tmp_path / "cache", monkeypatch):
        yield tmp_path / "hub/models"


def list_names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_merge_is_pushed_as_it_is_and_a_second_one_takes_its_place(models, hub, tmp_path, caplog) -> None:
    asked = [f"base={models}/base", f"experts=[{models}/expert]", "merger=task_arithmetic", "push_to=me/merged"]
    out = tmp_path / "out"
    with caplog.at_level(logging.INFO):
        merge_command(tmp_path, *asked, f"out={out}", "metrics={gsm8k: 1e-5, arc_easy/acc_norm: 0.7}")
    assert f"{constants.ENDPOINT}/me/merged (private)" in caplog.text
    assert list_names(hub / "me/merged") == list_names(out)
    pushed = open_checkpoint("me/merged")
    assert all(torch.equal(pushed[name], t) for name, t in load_file(out / "model.safetensors").items())

    card = ModelCard.load(hub / "me/merged/README.md")
    assert "AutoModelForCausalLM.from_pretrained('me/merged')" in card.text
    results = [(r.dataset_name, r.metric_type, r.metric_value, r.task_type) for r in card.data.eval_results]
    assert results == [
        ("gsm8k", "score", 1e-5, "text-generation"), ("arc_easy", "acc_norm", 0.7, "text-generation")
    ]  # fmt: skip

    (hub / "me/merged/notes.md").write_text("by hand")
    merge_command(tmp_path, *asked, f"out={tmp_path}/shards", "max_shard_bytes=10000")
    assert list_names(hub / "me/merged") == list_names(tmp_path / "shards") | {"notes.md"}
    assert "model.safetensors" not in list_names(tmp_path / "shards")
    assert not holds(tmp_path, TOKEN)
    assert TOKEN not in caplog.text


def test_an_upload_that_fails_leaves_the_adapter_and_says_how_to_repeat(models, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    root, out = tmp_path / "hub", tmp_path / "out"
    pair = (models / "base", models / "expert")
    with (
        serve(root, tmp_path / "cache", monkeypatch, full=True),
        pytest.raises(InputError, match=r"me/lora.*507") as failed,
    ):
        mergekit_lab.extract(*pair, out, rank=2, push_to="me/lora", push_private=False)
    assert (out / "adapter_model.safetensors").is_file()
    words = shlex.split(str(failed.value).splitlines()[-1])
    assert words[:5] == ["hf", "upload", "me/lora", str(out), "."]
    assert "--private" not in words
    with serve(root, tmp_path / "cache", monkeypatch):
        own = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "huggingface_hub.cli.hf", *words[1:]]
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list_names(root / "models/me/lora") == list_names(out)
    assert not (root / "private").exists()
    assert not holds(tmp_path, TOKEN)


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        ("merged", TOKEN, "of the hub, org/name"),
        ("me/merged@v1", TOKEN, "of the hub, org/name"),
        ("me/merged", None, "`hf.*login`"),
        ("me/merged", TOKEN, ".HF_HUB_OFFLINE"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_any_work(repo, token, message, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=message):
        check_push(repo)


@pytest.mark.parametrize(("token", "message"), [("hf_old", "does not know"), (READER, "the token only reads")])
def test_a_token_that_may_not_write_is_refused_before_any_work(token, message, hub, monkeypatch) -> None:
    check_push("me/merged")
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(InputError, match=message) as failed:
        check_push("me/merged")
    assert token not in str(failed.value)


def test_a_token_that_a_client_s_error_repeats_is_not_passed_on(models, hub, tmp_path, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(f"illegal header Bearer {TOKEN}")

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", fail)
    with pytest.raises(InputError, match="illegal header Bearer …") as failed:
        mergekit_lab.extract(models / "base", models / "expert", tmp_path / "out", rank=1, push_to="me/lora")
    assert TOKEN not in str(failed.value)
