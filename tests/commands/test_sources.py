"""The command that merges checkpoints: mistakes by name, several ways to say one thing, kills without trace."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints.models import make_llama, make_t5, save, save_three, tune, write_tensors_of
from composing import compose_config, merge_command
from programs import run_program

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.merging import DARE, TIES, TaskArithmetic, merge_state_dicts

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's call
METHOD = TIES(preset="mergekit", density=0.4)
METHOD_OF_ONE = TaskArithmetic(coefficient=0.5)


def damage(folder: Path, how: str) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    if how == "truncated":
        file.write_bytes(content[:-100])
    elif how == "header":
        file.write_bytes(content[:8] + b"[" + content[9:])
    elif how == "length":
        file.write_bytes(struct.pack("<Q", 1 << 40) + content[8:])
    elif how == "gone":
        file.unlink()
    elif how == "offsets":
        header = json.loads(content[8 : 8 + size])
        name = next(n for n in header if n != "__metadata__")
        header[name]["data_offsets"][1] += 4
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    elif how == "nan":
        state = dict(open_checkpoint(file))
        state[next(iter(state))].view(-1)[0] = float("nan")
        write_tensors(file, state)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "not a readable safetensors"),
        ("header", r"cars: .*not a readable safetensors"),
        ("length", r"cars: .*not a readable safetensors"),
        ("offsets", r"cars: .*not a readable safetensors"),
        ("gone", r"cars: .*(does not exist|incomplete)"),
        ("nan", "holds 1 NaN"),
    ],
)
def test_damaged_inputs_are_named_and_leave_nothing(how: str, message: str, tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path / "in")
    damage(experts["cars"], how)
    (tmp_path / "here").mkdir()
    with pytest.raises(InputError, match=message):
        mergekit_lab.merge(base, experts, tmp_path / "here/out", METHOD, device="cpu")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    ("experts", "keywords", "message"),
    [
        (["other"], {}, r"'other' lacks .*model.layers.1"),
        (["t5"], {}, "'t5' lacks.*lacks"),
        ([], {}, "nothing to merge"),
        (["cars"], {"dtype": "float23"}, "did you mean 'float32'"),
        (["cars"], {"device": "cuda:7"}, "cuda:7"),
        (["cars"], {"include": ["*.nope"]}, r"'\*.nope' matches no"),
        (["cars"], {"tokenizer_from": "nowhere"}, "neither a folder nor"),
        (["cars"], {"max_shard_bytes": 0}, "max_shard_bytes is 0"),
        (["cars"], {"max_shard_bytes": "5GB"}, "max_shard_bytes is '5GB'"),
        (["cars"], {"dtype": torch.int8}, "floating-point dtype"),
        (["cars"], {"metrics": {"accuracy": "high"}}, "accuracy is 'high'"),
        ("cars", {}, r"experts is one path \(cars\)"),
        ([None], {}, "0 is.*NoneType"),
        (["x" * 5000], {}, "is not a path"),
        (["cars"], {"fishers": ["cars", "cars"]}, "2 fisher.*for 1 experts"),
        (["cars"], {"fishers": {"svhn": "cars"}}, r"\(svhn\),.*\(cars\)"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(experts, keywords, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_three(make_llama, tmp_path)
    save(make_llama(layers=1), tmp_path / "other")
    save(make_t5(), tmp_path / "t5")
    with pytest.raises(InputError, match=message):
        mergekit_lab.merge("base", experts, "out", TaskArithmetic(), **{"device": "cpu", **keywords})
    assert not list(tmp_path.glob("*out*"))


def test_a_tokenizer_must_fit_the_rows_that_come_out(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    longer = write_tensors_of(
        tune(make_llama(vocabulary=38), 3), tmp_path / "longer", [f"t{n}" for n in range(38)]
    )
    for models, options in ((experts, {}), ([longer], {"embeddings": "intersect"})):
        with pytest.raises(InputError, match=r"37,.*has 36 rows"):
            mergekit_lab.merge(base, models, tmp_path / "out", METHOD, tokenizer_from=longer, **options)
    out = mergekit_lab.merge(base, experts, tmp_path / "out", METHOD, tokenizer_from="cars", device="cpu")
    assert (out / "tokenizer.json").read_bytes() == (experts["cars"] / "tokenizer.json").read_bytes()


def test_an_input_or_a_strangers_folder_is_never_overwritten(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    for out in (base, experts["cars"], tmp_path):
        with pytest.raises(InputError, match="is an input of"):
            mergekit_lab.merge(base, experts, out, METHOD, overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years")
    with pytest.raises(InputError, match="not written by"):
        mergekit_lab.merge(base, experts, tmp_path / "mine", METHOD, overwrite=True)
    assert (tmp_path / "mine/thesis.tex").read_text() == "years"


def test_the_command_as_it_is_documented(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, experts = save_three(make_llama, tmp_path)
    done = run_program(
        tmp_path,
        *("+experiment=merge_checkpoints", "base=base", "experts=[cars,svhn]", "out=out", "run_dir=run"),
        *("merger=ties", "merger.preset=mergekit", "device=auto", "dtype=bfloat16"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = merge_state_dicts(base, experts, TIES(preset="mergekit"), dtype=torch.bfloat16)
    assert all(torch.equal(open_checkpoint(tmp_path / "out")[n], t) for n, t in wanted.items())


@pytest.mark.parametrize(
    "argument",
    [
        *("experts=[cars,svhn]", "experts={cars: cars, svhn: svhn}"),
        *("experts=@list.txt", "experts=@named.txt", "experts=@marked.txt"),
    ],
)
def test_experts_may_be_given_in_several_ways(argument: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, experts = save_three(make_llama, tmp_path)
    (tmp_path / "list.txt").write_text("# two\ncars\n\n  svhn\n")
    (tmp_path / "named.txt").write_text("\ufeffcars=cars\nsvhn = svhn\n", encoding="utf-8")
    (tmp_path / "marked.txt").write_text("\ufeffcars\nsvhn\n", encoding="utf-8")
    merge_command(tmp_path, "base=base", argument, "out=out", "merger=dare", "seed=3", "overwrite=true")
    wanted = merge_state_dicts(base, experts, DARE(seed=3))
    assert all(torch.equal(open_checkpoint(tmp_path / "out")[n], t) for n, t in wanted.items())


def test_other_runs_do_not_know_these_keys() -> None:
    cfg, _ = compose_config(["+experiment=quickstart"])
    assert not {"out", "recipe"} & set(cfg)
    cfg, _ = compose_config(["+experiment=merge_checkpoints"])
    assert not {"backbone", "suite", "optimizer", "training", "store"} & set(cfg)


def test_this_stage_loads_no_framework_for_training(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    script = (
        "import sys, mergekit_lab\nfrom mergekit_lab.merging import TIES\n"
        f"mergekit_lab.merge({str(base)!r}, [{str(experts['cars'])!r}], {str(tmp_path / 'out')!r}, TIES())\n"
        "print([m for m in ('lightning', 'transformers', 'open_clip', 'peft', 'huggingface_hub') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["base=base", "experts=[cars]", "merger=ties", "out=o", "tokenizer_from=/etc"],
            "/etc holds no tokenizer",
        ),
        (["experts=[a]", "out=o", "merger=ties"], "base is not set"),
        (["base=base", "out=o", "merger=ties"], "experts is not set"),
        (["base=base", "experts=[]", "out=o", "merger=ties"], "experts is not set"),
        (["base=base", "experts=cars", "out=o", "merger=ties"], r"give a list, experts=\[cars\]"),
        (["base=base", "experts=[null]", "out=o", "merger=ties"], "experts holds None"),
        (["base=base", "experts=@binary.txt", "out=o", "merger=ties"], r"binary\.txt"),
        (["base=base", "experts=[cars]", f"out={'o' * 300}", "merger=ties"], "cannot be a folder"),
        (["base=base", "experts=@nowhere.txt", "out=o", "merger=ties"], r"nowhere\.txt"),
        (["base=base", "experts=[cars]", "out=o"], "merger is not set"),
        (["base=base", "experts=[cars]", "out=o", "merger=fisher"], "needs a fisher checkpoint"),
        (["base=base", "experts=[cars]", "out=o", "merger=ties", "merger.density=3"], r"must be in \(0, 1\]"),
        (["base=base", "experts=[cars]", "out=o", "merger=ties", "device=0.5"], "device is 0.5"),
        (["base=base", "experts=[cars]", "out=o", "merger=ties", "device=7"], "cuda:7"),
        (["base=base", "experts=[cars]", "merger=ties", "dry_run=true"], "would not work"),
        (["recipe=r.yml", "base=base", "out=o"], "already sets base"),
        (["recipe=r.yml", "out=o"], "cannot be read"),
        (["+expert=[cars]"], "'expert'.*'experts'"),
        (
            ["overwrite=perhaps", "base=base", "experts=[cars]", "merger=ties", "out=o"],
            "overwrite is 'perhaps'",
        ),
        (["+backbone=clip_vit_b32"], "unknown key 'backbone'"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(make_llama(), tmp_path / "base")
    save(tune(make_llama(), 1), tmp_path / "cars")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=message):
        merge_command(tmp_path, *arguments)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "out is not set"),
        (["out=full"], "exists and is not empty"),
        (["out=file.txt"], "is a file; give a folder"),
        (["out=o", "dtype=bfloat"], "did you mean 'bfloat16'"),
        (["out=o", "format=lowrank"], "'low_rank'"),
        (["out=o", "embeddings=intersectt"], "did you mean 'intersect'"),
        (["out=o", "device=cudaa"], "cudaa"),
        (["out=o", "max_shard_bytes=0"], "max_shard_bytes is 0.*least 1"),
        (["out=o", "merger.weights=[1,2,3]"], "weights"),
        (["out=o", "experts=[/nowhere/x,org/b]"], "x: /nowhere/x does not exist"),
    ],
)
def test_what_can_be_judged_before_the_hub_is_asked_is(arguments, message, tmp_path, monkeypatch) -> None:
    def ask(*_: object) -> None:
        pytest.fail("the hub was asked first")

    monkeypatch.setattr("mergekit_lab.checkpoints.reader.get_snapshot", ask)
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    for name in ("full/thesis.tex", "file.txt"):
        Path(name).write_text("years")
    with pytest.raises(InputError, match=message):
        merge_command(tmp_path, "base=org/base", "experts=[org/a,org/b]", "merger=ties", *arguments)
