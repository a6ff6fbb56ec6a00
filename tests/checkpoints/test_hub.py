"""Hub ids: the cache is enough; without it and without a network the message comes at once."""

import json
import time

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from checkpoints.models import make_llama
from hub_server import COMMIT, serve

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import TensorSpec, hub, write_tensors


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def refuse(*arguments, **keywords):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    return tmp_path / "hub"


def make_cache(cache, commit: str = "a" * 40):
    folder = cache / "models--org--name" / "snapshots" / commit
    folder.mkdir(parents=True)
    (cache / "models--org--name/refs").mkdir(exist_ok=True)
    (cache / "models--org--name/refs/main").write_text(commit)
    return folder


def test_a_cached_snapshot_is_used_without_a_network(cache) -> None:
    state = make_llama().state_dict()
    write_tensors(make_cache(cache) / "model.safetensors", state)
    for name in ("org/name", "org/name@main", f"org/name@{'a' * 40}"):
        opened = open_checkpoint(name)
        assert all(torch.equal(opened[n], t) for n, t in state.items())


def test_offline_and_not_cached_says_so_at_once(monkeypatch) -> None:
    begun = time.monotonic()
    with pytest.raises(InputError, match=r"org/name@v2.*org/name --revision v2"):
        open_checkpoint("org/name@v2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="offline mode is set"):
        open_checkpoint("org/name")
    assert time.monotonic() - begun < 5


def test_a_snapshot_without_all_its_weights_is_not_taken(cache) -> None:
    folder = make_cache(cache)
    (folder / "config.json").write_text("{}")
    with pytest.raises(InputError, match="neither a local path"):
        open_checkpoint("org/name")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model-1.safetensors"}})
    )
    with pytest.raises(InputError, match="neither a local path"):
        open_checkpoint("org/name")
    write_tensors(folder / "model-1.safetensors", {"w": torch.ones(2)})
    assert list(open_checkpoint("org/name")) == ["w"]


def test_a_name_that_the_hub_does_not_show_is_told_from_a_missing_network(monkeypatch) -> None:
    class Response:
        status_code = 404

    def raise_error(*arguments, **keywords):
        error = RuntimeError("404")
        error.response = Response()  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", raise_error)
    with pytest.raises(InputError, match=r"status 404.*hf auth login"):
        open_checkpoint("org/nmae")


@pytest.fixture
def online(cache, tmp_path, monkeypatch):
    """The repository org/name on a hub of this machine, a pickle beside its weights; gives what is asked."""
    monkeypatch.undo()
    folder = tmp_path / "served/models/org/name"
    folder.mkdir(parents=True)
    write_tensors(folder / "model.safetensors", {"w": torch.ones(4, 2), "ids": torch.arange(3)})
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with serve(tmp_path / "served", cache, monkeypatch) as asked:
        yield asked


def list_files(asked: list[str]) -> set[str]:
    return {line.rpartition("/")[2] for line in asked if line.startswith("GET /org/name/resolve")}


def test_what_is_downloaded_leaves_pickles_where_safetensors_are_and_is_found_again(
    cache, online, monkeypatch
) -> None:
    for name in ("org/name@main", "org/name", f"org/name@{COMMIT}"):
        opened = open_checkpoint(name)
        assert torch.equal(opened["w"], torch.ones(4, 2))
        assert opened.folder == cache / "models--org--name/snapshots" / COMMIT
        if name == "org/name@main":
            assert list_files(online) == {"config.json", "model.safetensors"}
            online.clear()
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert online == []


def test_headers_are_read_from_afar_where_only_they_are_wanted(online) -> None:
    opened = open_checkpoint("org/name", "cars", headers_only=True)
    assert opened.specs["w"] == TensorSpec((4, 2), torch.float32)
    assert opened.folder is not None
    assert [file.name for file in opened.folder.iterdir()] == ["config.json"]
    with pytest.raises(InputError, match="'w' is still on"):
        opened["w"]


def test_headers_for_open_clip_are_read_from_afar_too_and_those_of_pickles_are_not(tmp_path, online) -> None:
    served = tmp_path / "served/models/org/name"
    (served / "model.safetensors").rename(served / "open_clip_model.safetensors")
    assert open_checkpoint("org/name", headers_only=True).specs["w"] == TensorSpec((4, 2), torch.float32)
    (served / "open_clip_model.safetensors").unlink()
    with pytest.raises(InputError, match="no safetensors headers"):
        open_checkpoint("org/name", headers_only=True)


def test_an_adapter_that_has_a_name_lies_in_a_folder_below_the_repositorys(
    tmp_path, online, monkeypatch
) -> None:
    served = tmp_path / "served/models/org/name"
    for file in served.iterdir():
        file.unlink()
    (served / "math").mkdir()
    write_tensors(
        served / "math/adapter_model.safetensors",
        {
            "base_model.model.w.lora_A.weight": torch.ones(1, 2),
            "base_model.model.w.lora_B.weight": torch.ones(4, 1),
        },
    )
    (served / "math/adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    base = open_checkpoint({"w.weight": torch.zeros(4, 2)})
    for headers_only in (True, False):
        opened = open_checkpoint("org/name", base=base, headers_only=headers_only)
        assert torch.equal(opened["w.weight"], torch.ones(4, 2))
        online.clear()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("text", "hub_id"),
    [
        ("org/name", ("org/name", None)),
        ("org/name-1.5@v1", ("org/name-1.5", "v1")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        ("a/b/c", None),
        ("./a/b", None),
        ("../name", None),
        ("/abs/path", None),
        ("name", None),
    ],
)
def test_which_strings_could_be_hub_ids(text, hub_id) -> None:
    assert hub.parse_hub_id(text) == hub_id


def test_a_proxy_that_does_not_answer_is_a_network_that_is_not_there(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://huggingface.co")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    huggingface_hub.close_session()
    assert "connection to huggingface.co through" in (hub.explain_unreachable() or "")
    huggingface_hub.close_session()
