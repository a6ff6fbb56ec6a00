"""Whatever holds them, tensors come back the same; what cannot be trusted is not opened."""

import json
import os
import pickle
import warnings

import pytest
import torch
from safetensors.torch import save_file

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import write_tensors


@pytest.fixture
def tensors():
    return {"w": torch.randn(4, 3), "b": torch.randn(4).bfloat16(), "ids": torch.arange(5)}


def assert_same(checkpoint, tensors) -> None:
    assert set(checkpoint) == set(tensors)
    for name, value in tensors.items():
        assert torch.equal(checkpoint[name], value)
        assert checkpoint.specs[name].shape == tuple(value.shape)
        assert checkpoint.specs[name].dtype == value.dtype


def test_every_layout_gives_the_same_tensors(tmp_path, tensors) -> None:
    write_tensors(tmp_path / "single.safetensors", tensors)
    torch.save(tensors, tmp_path / "plain.pt")
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "lightning.ckpt")
    for folder in ("folder", "sharded", "odd"):
        (tmp_path / folder).mkdir()
    write_tensors(tmp_path / "folder/model.safetensors", tensors)
    write_tensors(tmp_path / "odd/anything.safetensors", tensors)
    shards = {"w": "part-1.safetensors", "b": "part-2.safetensors", "ids": "part-2.safetensors"}
    for file in set(shards.values()):
        save_file({n: tensors[n] for n, f in shards.items() if f == file}, tmp_path / "sharded" / file)
    (tmp_path / "sharded/model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for source in ("single.safetensors", "plain.pt", "lightning.ckpt", "folder", "sharded", "odd"):
        assert_same(open_checkpoint(tmp_path / source), tensors)
    assert_same(open_checkpoint(tensors), tensors)


def test_a_truncated_file_is_named(tmp_path, tensors) -> None:
    for name in ("cut.safetensors", "cut.pt"):
        file = tmp_path / name
        write_tensors(file, tensors) if name.endswith("safetensors") else torch.save(tensors, file)
        file.write_bytes(file.read_bytes()[:-40])
        with pytest.raises(InputError, match=rf"expert_a: .*{name}.*copy cut short"):
            open_checkpoint(file, "expert_a")


class Malicious:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(tmp_path) -> None:
    torch.save({"w": torch.zeros(2), "extra": Malicious()}, tmp_path / "evil.pt")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(Malicious()))
    for file in ("evil.pt", "plain.bin"):
        with pytest.raises(InputError, match=r"not opened|cannot be read"):
            open_checkpoint(tmp_path / file)


def test_a_whole_module_is_refused_with_the_way_out(tmp_path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(InputError, match=r"save `model.state_dict\(\)` instead"):
        open_checkpoint(tmp_path / "module.pt")


def test_a_program_is_told_from_a_file_that_was_cut(tmp_path) -> None:
    """OpenAI gives CLIP away as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(str(tmp_path / "jit.pt"))
    with pytest.raises(InputError, match=r"is a TorchScript archive.*torch\.jit\.load"):
        open_checkpoint(tmp_path / "jit.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"cannot be read \(EOFError\)"):
        open_checkpoint(tmp_path / "empty.pt")


def test_an_index_that_leaves_its_folder_is_refused(tmp_path, tensors) -> None:
    write_tensors(tmp_path / "secret.safetensors", tensors)
    (tmp_path / "model").mkdir()
    index = {"weight_map": dict.fromkeys(tensors, "../secret.safetensors")}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="outside its folder"):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"metadata": {}}'])
def test_a_broken_index_is_named(tmp_path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match="not a safetensors index"):
        open_checkpoint(tmp_path)


def test_an_index_of_missing_shards_or_tensors_is_named(tmp_path, tensors) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "gone.safetensors"}})
    )
    with pytest.raises(InputError, match="does not exist"):
        open_checkpoint(tmp_path)
    write_tensors(tmp_path / "gone.safetensors", {"v": tensors["w"]})
    with pytest.raises(InputError, match=r"its files lack \(w\)"):
        open_checkpoint(tmp_path)


def test_paths_that_hold_nothing_readable_are_named(tmp_path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(InputError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere.pt")
    with pytest.raises(InputError, match=r"holds 0 \.safetensors files"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match="no checkpoint that can be read"):
        open_checkpoint(tmp_path / "notes.txt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(InputError, match="holds a list"):
        open_checkpoint(tmp_path / "list.pt")


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, tensors) -> None:
    file = tmp_path / "model.safetensors"
    write_tensors(file, tensors)
    with pytest.raises(AttributeError):
        write_tensors(file, {"w": "no tensor"})  # type: ignore[dict-item]
    assert_same(open_checkpoint(file), tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_folders_with_pickles_as_older_programs_wrote_them(tmp_path, tensors) -> None:
    for folder in ("single", "sharded", "legacy"):
        (tmp_path / folder).mkdir()
    torch.save(tensors, tmp_path / "single/pytorch_model.bin")
    torch.save({}, tmp_path / "single/training_args.bin")
    torch.save(tensors, tmp_path / "legacy/pytorch_model.bin", _use_new_zipfile_serialization=False)
    shards = {"w": "pytorch_model-1.bin", "b": "pytorch_model-2.bin", "ids": "pytorch_model-2.bin"}
    for file in set(shards.values()):
        torch.save({n: tensors[n] for n, f in shards.items() if f == file}, tmp_path / "sharded" / file)
    index = tmp_path / "sharded/pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    for folder in ("single", "sharded", "legacy"):
        opened = open_checkpoint(tmp_path / folder)
        assert_same(opened, tensors)
        assert opened.folder == tmp_path / folder
        assert opened.files
    index.write_text(json.dumps({"weight_map": shards | {"lost": "pytorch_model-1.bin"}}))
    with pytest.raises(InputError, match=r"its files lack \(lost\)"):
        open_checkpoint(tmp_path / "sharded")


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "."])
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_no_index_leads_out_of_its_folder(file: str, index: str, tmp_path) -> None:
    (tmp_path / index).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(InputError, match="outside its folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.safetensors.index.json"])
def test_a_pipe_is_refused_rather_than_waited_for(name: str, tmp_path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="is a pipe or a device, not a file"):
        open_checkpoint(tmp_path / name)


def test_an_index_of_safetensors_may_not_name_a_pickle(tmp_path) -> None:
    torch.save({"w": Malicious()}, tmp_path / "evil.bin")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "evil.bin"}}))
    with pytest.raises(InputError, match=r"not \.safetensors"):
        open_checkpoint(tmp_path)


def test_malicious_legacy_and_lightning_files_are_not_run(tmp_path) -> None:
    torch.save({"w": Malicious()}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": {"w": torch.ones(1)}, "hyper_parameters": Malicious()}, tmp_path / "run.ckpt")
    for file in ("legacy.pt", "run.ckpt"):
        with pytest.raises(InputError, match="not opened"):
            open_checkpoint(tmp_path / file)


def test_weights_that_share_memory_are_tied(tmp_path) -> None:
    shared = torch.randn(4, 2)
    torch.save({"embed": shared, "other": shared.clone(), "head": shared}, tmp_path / "model.pt")
    assert open_checkpoint(tmp_path / "model.pt").tied() == {"head": "embed"}


@pytest.mark.filterwarnings("ignore:Validating sparse")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({3: torch.zeros(2)}, r"names that are not text \(3\)"),
        ({"a\x1b[2J": torch.zeros(2)}, r"names that cannot be printed \('a\\x1b\[2J'\)"),
        ({"w": torch.empty(2, device="meta")}, "w is on the device meta"),
        ({"w": torch.eye(2).to_sparse()}, r"sparse or quantized tensors \(w\)"),
    ],
)
def test_a_state_dict_of_other_things_is_named(content, message: str, tmp_path) -> None:
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(InputError, match=message):
        dict(open_checkpoint(tmp_path / "odd.pt"))
