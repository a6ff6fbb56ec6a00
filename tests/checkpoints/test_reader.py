"""Whatever holds them, tensors come back the same; what cannot be trusted is not opened."""

import argparse
import json
import os
import pickle
import shutil
import tarfile
import warnings
import zipfile
from pathlib import Path

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
    variant = shutil.copytree(tmp_path / "sharded", tmp_path / "variant")
    (variant / "model.safetensors.index.json").rename(variant / "model.safetensors.index.fp16.json")
    for source in ("single.safetensors", "plain.pt", "lightning.ckpt", "folder", "sharded", "odd", "variant"):
        assert_same(open_checkpoint(tmp_path / source), tensors)
    assert_same(open_checkpoint(tensors), tensors)


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_a_single_file_counts_before_an_index_of_an_earlier_save(file_format: str, tmp_path, tensors) -> None:
    """As in transformers, whether the shards of that index are still there or not."""
    old = {name: torch.zeros_like(value) for name, value in tensors.items()}
    write = write_tensors if file_format == "safetensors" else lambda file, values: torch.save(values, file)
    name = "model.safetensors" if file_format == "safetensors" else "pytorch_model.bin"
    index = {"weight_map": dict.fromkeys(tensors, f"shard-1.{file_format}")}
    (tmp_path / f"{name}.index.json").write_text(json.dumps(index))
    write(tmp_path / name, tensors)
    assert_same(open_checkpoint(tmp_path), tensors)
    write(tmp_path / f"shard-1.{file_format}", old)
    assert_same(open_checkpoint(tmp_path), tensors)
    (tmp_path / name).unlink()
    assert_same(open_checkpoint(tmp_path), old)


def test_the_file_that_a_configuration_names_counts_first(tmp_path, tensors) -> None:
    write_tensors(tmp_path / "model.safetensors", {"old": torch.zeros(1)})
    write_tensors(tmp_path / "consolidated.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "consolidated.safetensors"}))
    assert_same(open_checkpoint(tmp_path), tensors)


def test_every_tensor_of_the_files_under_an_index_is_read(tmp_path, tensors) -> None:
    """Some indexes are written by hand: transformers takes of them only which files there are."""
    write_tensors(tmp_path / "a.safetensors", {"w": tensors["w"], "b": tensors["b"]})
    write_tensors(tmp_path / "b.safetensors", {"ids": tensors["ids"]})
    index = {"weight_map": {"w": "./a.safetensors", "ids": ".//b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(open_checkpoint(tmp_path), tensors)


def repack(file: Path, compression: int, cut: str = "") -> None:
    """Write a zip archive again, as an archiver does, with one record too short if that is wanted."""
    with zipfile.ZipFile(file) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content[:4] if cut and name.endswith(cut) else content)


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_a_torch_file_that_was_packed_again_holds_the_same_tensors(compression, tmp_path, tensors) -> None:
    torch.save(tensors, tmp_path / "model.pt")
    repack(tmp_path / "model.pt", compression)
    assert_same(open_checkpoint(tmp_path / "model.pt"), tensors)


def test_a_torch_file_with_a_record_too_short_is_refused(tmp_path, tensors) -> None:
    torch.save(tensors, tmp_path / "model.pt")
    repack(tmp_path / "model.pt", zipfile.ZIP_STORED, cut="data/0")
    with pytest.raises(InputError, match=r"model\.pt cannot be read"):
        open_checkpoint(tmp_path / "model.pt")


def test_a_large_torch_file_is_mapped_and_not_read(tmp_path) -> None:
    torch.save({"w": torch.zeros(1 << 22)}, tmp_path / "model.pt")
    before = read_resident_bytes()
    opened = open_checkpoint(tmp_path / "model.pt")
    assert opened["w"].shape == (1 << 22,)
    assert read_resident_bytes() - before < 8 << 20


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": state, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}, "epoch": 3},
        lambda state: {"module": state, "ds_config": {}, "param_shapes": [{"w": torch.Size([4, 3])}]},
        lambda state: {"model_state_dict": state, "rng_state": torch.zeros(8, dtype=torch.uint8)},
        lambda state: {"state_dict": {"model": state}},
        lambda state: {"weights": state, "loss": 0.5},
        lambda state: {**state, "version": "2", "extra": None},
    ],
    ids=["model", "deepspeed", "model_state_dict", "nested", "unknown", "plain values"],
)
def test_a_state_dict_is_read_out_of_what_trainers_put_it_into(wrap, tmp_path, tensors) -> None:
    torch.save(wrap(tensors), tmp_path / "saved.pt")
    assert_same(open_checkpoint(tmp_path / "saved.pt"), tensors)


def test_of_two_models_in_one_file_none_is_guessed(tmp_path, tensors) -> None:
    torch.save({"model": tensors, "model_ema": tensors}, tmp_path / "saved.pt")
    with pytest.raises(InputError, match=r"\(model, model_ema\)"):
        open_checkpoint(tmp_path / "saved.pt")


class Settings:
    """A class that unpickling would have to import; it says if anything of it is called."""

    def __setstate__(self, state):
        raise AssertionError("called")


def test_foreign_objects_beside_the_weights_are_left_out_unread(tmp_path, tensors) -> None:
    settings = Settings()
    settings.rate = 0.1  # type: ignore[attr-defined]
    extra = {"hyper_parameters": argparse.Namespace(path=tmp_path, settings=settings), "epoch": 1}
    torch.save({"state_dict": tensors, **extra}, tmp_path / "run.ckpt")
    assert_same(open_checkpoint(tmp_path / "run.ckpt"), tensors)
    torch.save({**tensors, "attention._extra_state": settings}, tmp_path / "plain.pt")
    assert_same(open_checkpoint(tmp_path / "plain.pt"), tensors)


def test_a_foreign_object_in_the_stead_of_a_weight_is_refused(tmp_path, tensors) -> None:
    """It could be a tensor of a class of its own."""
    torch.save({"state_dict": {**tensors, "packed": Settings()}}, tmp_path / "run.ckpt")
    with pytest.raises(InputError, match=r"not tensors \(packed\)"):
        open_checkpoint(tmp_path / "run.ckpt")


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
    torch.save({"w": Malicious()}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": {"w": torch.ones(1)}, "hyper_parameters": Malicious()}, tmp_path / "run.ckpt")
    for file in ("evil.pt", "plain.bin", "legacy.pt", "run.ckpt"):
        with pytest.raises(InputError, match=r"not opened|cannot be read"):
            open_checkpoint(tmp_path / file)


def test_a_whole_module_is_refused_with_the_way_out(tmp_path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(InputError, match=r"\(it.*torch\S+Linear\).*`model.state_dict\(\)`"):
        open_checkpoint(tmp_path / "module.pt")


def test_a_program_is_told_from_a_file_that_was_cut(tmp_path) -> None:
    """OpenAI gives CLIP away as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(str(tmp_path / "jit.pt"))
    with pytest.raises(InputError, match=r"TorchScript.*torch\.jit\.load"):
        open_checkpoint(tmp_path / "jit.pt")
    with tarfile.open(tmp_path / "packed.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("pipe"))
    with pytest.raises(InputError, match=r"packed\.pt .*(not opened|cannot be read)"):
        open_checkpoint(tmp_path / "packed.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"cannot be read \(EOFError\)"):
        open_checkpoint(tmp_path / "empty.pt")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"metadata": {}}'])
def test_a_broken_index_is_named(tmp_path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=r"index\.json is not (JSON|a safetensors index)"):
        open_checkpoint(tmp_path)


def test_an_index_of_missing_shards_or_tensors_is_named(tmp_path, tensors) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "gone.safetensors"}})
    )
    with pytest.raises(InputError, match=r"not in .*gone\.safetensors"):
        open_checkpoint(tmp_path)
    write_tensors(tmp_path / "gone.safetensors", {"v": tensors["w"]})
    with pytest.raises(InputError, match=r"its files lack \(w\)"):
        open_checkpoint(tmp_path)


def test_paths_that_hold_nothing_readable_are_named(tmp_path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(InputError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere.pt")
    with pytest.raises(InputError, match=r"holds no weights.*\(it is empty\)"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match="not a readable checkpoint"):
        open_checkpoint(tmp_path / "notes.txt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(InputError, match="holds a list"):
        open_checkpoint(tmp_path / "list.pt")


def test_a_folder_says_what_it_holds_in_the_stead_of_weights(tmp_path, tensors) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    write_tensors(tmp_path / "checkpoint-500" / "model.safetensors", tensors)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"no weights.*m\.gguf\); there are some below it, in checkpoint-500"):
        open_checkpoint(tmp_path)
    for number in (1, 2):
        write_tensors(tmp_path / f"model-0000{number}-of-00002.safetensors", tensors)
    with pytest.raises(InputError, match=r"2 \.safetensors files.*their index is missing"):
        open_checkpoint(tmp_path)


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


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "a/../../b.safetensors", "..", "."])
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_no_index_leads_out_of_its_folder(file: str, index: str, tmp_path) -> None:
    (tmp_path / index).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(InputError, match="outside its folder"):
        open_checkpoint(tmp_path)


FILES = ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "config.json"]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is a pipe or"),
        (lambda file: file.symlink_to("/dev/zero"), "is a pipe or"),
        (lambda file: file.symlink_to(file.name), "cannot be read"),
        (lambda file: file.symlink_to("nowhere"), r"\(nowhere\)"),
        (lambda file: file.mkdir(), "is a folder, not a file"),
        (lambda file: file.write_bytes(LFS), "Git LFS.*`git.*pull`"),
        (lambda file: file.write_text("/annex/objects/SHA256E-s1--a"), "is a git-annex pointer"),
    ],
    ids=["pipe", "device", "loop", "dead link", "folder", "lfs", "annex"],
)
def test_what_is_no_file_is_named_rather_than_waited_for(name: str, make, message: str, tmp_path) -> None:
    if name == "config.json":
        write_tensors(tmp_path / "model.safetensors", {"w": torch.zeros(2)})
    make(tmp_path / name)
    sources = [tmp_path]
    if name != "config.json" and not (tmp_path / name).is_dir():
        sources.append(tmp_path / name)
    for source in sources:
        with pytest.raises(InputError, match=rf"{name} .*{message}"):
            dict(open_checkpoint(source))


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 900 + "1" + "}" * 900])
def test_a_file_that_is_nested_too_deep_is_named(name: str, content: str, tmp_path) -> None:
    if name == "config.json":
        write_tensors(tmp_path / "model.safetensors", {"w": torch.zeros(2)})
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"{name} is nested too deep"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("config", [{"model_type": ["llama"]}, {"model_type": {}}, {"text_config": [1]}])
def test_a_configuration_of_odd_types_ties_nothing(config, tmp_path, tensors) -> None:
    write_tensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).find_ties() == {}


@pytest.mark.parametrize("file", ["x" * 300 + ".safetensors", "x\0.safetensors", "é" * 200 + ".safetensors"])
def test_an_index_with_names_that_cannot_be_is_named(file: str, tmp_path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(InputError, match="names 1 of 1 files"):
        open_checkpoint(tmp_path)


def test_an_index_says_which_of_its_files_are_not_there(tmp_path, tensors) -> None:
    write_tensors(tmp_path / "a.safetensors", tensors)
    index = {"weight_map": {"w": "a.safetensors", "b": "b.safetensors", "ids": "c.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"2 of 3 files.*b\.safetensors', 'c\.safetensors"):
        open_checkpoint(tmp_path)


def test_an_index_of_safetensors_may_not_name_a_pickle(tmp_path) -> None:
    torch.save({"w": Malicious()}, tmp_path / "evil.bin")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "evil.bin"}}))
    with pytest.raises(InputError, match=r"not \.safetensors"):
        open_checkpoint(tmp_path)


def test_weights_that_share_memory_are_tied(tmp_path) -> None:
    shared = torch.randn(4, 2)
    torch.save({"embed": shared, "other": shared.clone(), "head": shared}, tmp_path / "model.pt")
    assert open_checkpoint(tmp_path / "model.pt").find_ties() == {"head": "embed"}


@pytest.mark.filterwarnings("ignore:Validating sparse")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({3: torch.zeros(2)}, r"are not text \(3\)"),
        ({"a\x1b[2J": torch.zeros(2)}, r"cannot be printed \('a\\x1b\[2J'\)"),
        ({"w": torch.empty(2, device="meta")}, "w is on the"),
        ({"w": torch.eye(2).to_sparse()}, r"sparse or quantized tensors \(w\)"),
    ],
)
def test_a_state_dict_of_other_things_is_named(content, message: str, tmp_path) -> None:
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(InputError, match=message):
        dict(open_checkpoint(tmp_path / "odd.pt"))
