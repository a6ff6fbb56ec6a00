"""Files planned from headers, filled in any order, are what safetensors itself would read."""

import json
import os
import random
import threading

import pytest
import torch
from safetensors.torch import load_file

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import ShardedWriter, TensorSpec, write_tensors
from mergekit_lab.checkpoints.shards import plan_files, plan_shards


def make_tensors(count: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{n}.wéight": torch.randn(n + 1, 7, generator=generator) for n in range(count)}
    tensors |= {f"half.{n}": torch.randn(5, generator=generator).bfloat16() for n in range(3)}
    tensors |= {
        "ids": torch.arange(3),
        "flag": torch.tensor([True, False, True]),
        "byte": torch.tensor([7], dtype=torch.uint8),
    }
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}


def get_specs(tensors):
    return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_on_the_disk_when_it_has_its_name_unless_who_publishes_it_waits(sync, tmp_path, monkeypatch):
    synced: list[object] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write_tensors(tmp_path / "w.safetensors", {"w": torch.ones(2)}, **({} if sync else {"sync": False}))
    assert len(synced) == sync


@pytest.mark.parametrize("limit", [1, 200, 10**9])
def test_any_order_and_any_size_of_files_give_the_tensors_back(limit: int, tmp_path) -> None:
    tensors = make_tensors()
    order = list(tensors)
    random.Random(1).shuffle(order)
    with ShardedWriter(tmp_path, get_specs(tensors), limit) as writer:
        for name in order:
            writer.write(name, tensors[name])
    opened = open_checkpoint(tmp_path)
    assert set(opened) == set(tensors)
    for name, value in tensors.items():
        assert torch.equal(opened[name], value)
        assert opened[name].dtype == value.dtype
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == len(plan_shards(get_specs(tensors), limit))
    for file in files:
        load_file(file)
    assert plan_files(get_specs(tensors), limit) == {p.name: p.stat().st_size for p in tmp_path.iterdir()}
    index = tmp_path / "model.safetensors.index.json"
    assert index.is_file() == (len(files) > 1)
    if index.is_file():
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"


def test_files_stay_under_their_limit_unless_one_tensor_is_larger() -> None:
    specs = {f"t{n}": TensorSpec((n,), torch.float32) for n in (10, 3, 4, 50, 2)}
    shards = plan_shards(specs, 45)
    assert [list(shard.specs) for shard in shards] == [["t10"], ["t3", "t4"], ["t50"], ["t2"]]
    assert list(plan_shards(specs, 10**6)[0].specs) == list(specs)
    for wrong in (0, -1):
        with pytest.raises(InputError, match="max_shard_bytes"):
            plan_shards(specs, wrong)


def test_a_dtype_that_safetensors_cannot_hold_is_refused_before_anything_is_written() -> None:
    with pytest.raises(InputError, match=r"'w' is torch\.complex128"):
        plan_shards({"w": TensorSpec((2,), torch.complex128)})


def test_a_file_may_have_the_longest_name_there_is(tmp_path) -> None:
    file = tmp_path / ("n" * 243 + ".safetensors")
    write_tensors(file, {"w": torch.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_threads_may_write_at_once(tmp_path) -> None:
    tensors = {f"t{n}": torch.full((1000,), float(n)) for n in range(64)}
    with ShardedWriter(tmp_path, get_specs(tensors), 40_000) as writer:
        names = list(tensors)
        threads = [
            threading.Thread(
                target=lambda part: [writer.write(n, tensors[n]) for n in part], args=(names[k::8],)
            )
            for k in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    opened = open_checkpoint(tmp_path)
    assert all(torch.equal(opened[name], value) for name, value in tensors.items())


def test_what_was_not_announced_is_refused(tmp_path) -> None:
    specs = {"w": TensorSpec((2, 2), torch.float32), "v": TensorSpec((1,), torch.float32)}
    for name, tensor, message in (
        ("other", torch.zeros(2, 2), "None was announced"),
        ("w", torch.zeros(4), "was announced"),
        ("w", torch.zeros(2, 2).half(), "was announced"),
    ):
        with pytest.raises(InputError, match=message), ShardedWriter(tmp_path, specs) as writer:
            writer.write(name, tensor)

    def write(names: str) -> None:
        with ShardedWriter(tmp_path, specs) as writer:
            for name in names:
                writer.write(name, torch.zeros(specs[name].shape))

    with pytest.raises(InputError, match="written twice"):
        write("vv")
    with pytest.raises(InputError, match=r"1 tensors were not written \(w\)"):
        write("v")
    write("vw")


@pytest.mark.parametrize("first", ["w", "v"])
def test_a_file_that_is_cut_while_it_is_written_is_no_success(first: str, tmp_path) -> None:
    """What is written afterwards would give it its size again, with zeros before."""
    tensors = {"w": torch.ones(500), "v": torch.ones(7)}

    def write() -> None:
        with ShardedWriter(tmp_path, get_specs(tensors)) as writer:
            writer.write(first, tensors.pop(first))
            os.truncate(tmp_path / "model.safetensors", 100)
            writer.write(*tensors.popitem())

    with pytest.raises(InputError, match="was cut by another"):
        write()


def test_tensors_that_lie_oddly_in_memory_are_written_as_they_read(tmp_path) -> None:
    wide = torch.arange(24.0).reshape(4, 6)
    tensors = {"transposed": wide.t(), "strided": wide[:, ::2], "expanded": torch.ones(1, 3).expand(4, 3)}
    with ShardedWriter(tmp_path, get_specs(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    opened = open_checkpoint(tmp_path)
    assert all(torch.equal(opened[name], value) for name, value in tensors.items())
