"""The command that merges checkpoints: mistakes by name, dry runs without reading, kills without traces."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints.models import llama, save, t5, three, tuned, write_tensors_of
from stages.conftest import composed

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import Checkpoint, write_tensors
from mergekit_lab.merging import (
    DARE,
    TIES,
    TSVM,
    WUDI,
    AdaMerging,
    Learning,
    RegMean,
    TaskArithmetic,
    merge_state_dicts,
)
from mergekit_lab.stages.checkpoint_inputs import prepare
from mergekit_lab.stages.estimate import report
from mergekit_lab.stages.run import run

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
        ("truncated", r"cars: .*not a readable safetensors.*copy cut short"),
        ("header", r"cars: .*not a readable safetensors"),
        ("length", r"cars: .*not a readable safetensors"),
        ("offsets", r"cars: .*not a readable safetensors"),
        ("gone", r"cars: .*does not exist"),
        ("nan", r"holds 1 NaN or infinite entries"),
    ],
)
def test_damaged_inputs_are_named_and_leave_nothing(how: str, message: str, tmp_path) -> None:
    base, experts = three(llama, tmp_path / "in")
    damage(experts["cars"], how)
    (tmp_path / "here").mkdir()
    with pytest.raises(InputError, match=message):
        mergekit_lab.merge(base, experts, tmp_path / "here/out", METHOD, device="cpu")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    ("experts", "keywords", "message"),
    [
        (["other"], {}, r"'other' lacks .*model.layers.1"),
        (["t5"], {}, r"'t5' lacks .*has .* tensors the base lacks"),
        ([], {}, "nothing to merge"),
        (["cars"], {"dtype": "float23"}, "did you mean 'float32'"),
        (["cars"], {"device": "cuda:7"}, "cuda:7.* is not there"),
        (["cars"], {"include": ["*.nope"]}, r"'\*.nope' matches no"),
        (["cars"], {"tokenizer_from": "nowhere"}, "is no folder and no expert"),
        (["cars"], {"max_shard_bytes": 0}, "max_shard_bytes is 0"),
        (["cars"], {"max_shard_bytes": "5GB"}, "max_shard_bytes is '5GB'; it must be a whole number"),
        (["cars"], {"dtype": torch.int8}, "must be a floating-point dtype"),
        (["cars"], {"metrics": {"accuracy": "high"}}, "metrics: accuracy is 'high'; it must be a number"),
        ("cars", {}, r"experts is one path \(cars\)"),
        ([None], {}, "0 is a NoneType: give a state dict"),
        (["x" * 5000], {}, "is no path"),
        (["cars"], {"fishers": ["cars", "cars"]}, "2 fisher inputs were given for 1 experts"),
        (["cars"], {"fishers": {"svhn": "cars"}}, r"for \(svhn\), the experts are \(cars\)"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(experts, keywords, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    three(llama, tmp_path)
    save(llama(layers=1), tmp_path / "other")
    save(t5(), tmp_path / "t5")
    with pytest.raises(InputError, match=message):
        mergekit_lab.merge("base", experts, "out", TaskArithmetic(), **{"device": "cpu", **keywords})
    assert not list(tmp_path.glob("*out*"))


def test_a_tokenizer_must_fit_the_rows_that_come_out(tmp_path) -> None:
    base, experts = three(llama, tmp_path)
    longer = write_tensors_of(tuned(llama(vocabulary=38), 3), tmp_path / "longer", [f"t{n}" for n in range(38)])
    for models, options in ((experts, {}), ([longer], {"embeddings": "intersect"})):
        with pytest.raises(InputError, match="tokens reach row 37, and the result has 36 rows"):
            mergekit_lab.merge(base, models, tmp_path / "out", METHOD, tokenizer_from=longer, **options)
    out = mergekit_lab.merge(base, experts, tmp_path / "out", METHOD, tokenizer_from="cars", device="cpu")
    assert (out / "tokenizer.json").read_bytes() == (experts["cars"] / "tokenizer.json").read_bytes()


def test_a_dry_run_tells_buffers_that_are_computed_from_those_that_must_agree(tmp_path) -> None:
    base = {"w": torch.ones(2), "e.position_ids": torch.arange(3)[None], "steps": torch.tensor(1)}
    expert = {name: base[name] for name in ("w", "steps")}
    said = report(prepare(base, [expert], METHOD_OF_ONE, read=False, device="cpu"), tmp_path / "o")
    assert said.works
    assert "1 buffers that the model computes, copied whatever experts have: e.position_ids" in said.text()
    assert "1 integer buffers, copied; the experts' must be equal: steps" in said.text()
    assert "buffers that a model computes are taken from the base: e.position_ids" in said.text()


def test_a_dry_run_foretells_the_size_of_factors(tmp_path) -> None:
    base, experts = three(llama, tmp_path)
    method = TSVM(rank=2)
    factors = mergekit_lab.merge(base, experts, tmp_path / "out", method, device="cpu", format="low_rank")
    specs = open_checkpoint(factors / "factors.safetensors").specs
    size = sum(spec.nbytes for spec in specs.values())
    said = report(
        prepare(base, experts, method, read=False, device="cpu"), tmp_path / "o", format="low_rank"
    ).text()
    assert f"{len(specs)} tensors in 1 files, {size / 1000:.1f} kB of disk" in said


def test_an_input_or_a_strangers_folder_is_never_overwritten(tmp_path) -> None:
    base, experts = three(llama, tmp_path)
    for out in (base, experts["cars"], tmp_path):
        with pytest.raises(InputError, match="is an input of this merge"):
            mergekit_lab.merge(base, experts, out, METHOD, overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years")
    with pytest.raises(InputError, match="was not written by a merge"):
        mergekit_lab.merge(base, experts, tmp_path / "mine", METHOD, overwrite=True)
    assert (tmp_path / "mine/thesis.tex").read_text() == "years"


# --- the command ----------------------------------------------------------------------------------------


def command(tmp_path: Path, *arguments: str) -> None:
    cfg, choices = composed(["+experiment=merge_checkpoints", "progress=false", "device=cpu", *arguments])
    run(cfg, tmp_path / "run", choices, list(arguments))


def test_the_command_as_it_is_documented(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, experts = three(llama, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mergekit_lab", "+experiment=merge_checkpoints", "base=base",
         "experts=[cars,svhn]", "out=out", "merger=ties", "merger.preset=mergekit", "device=auto",
         "dtype=bfloat16", "run_dir=run"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = merge_state_dicts(base, experts, TIES(preset="mergekit"), dtype=torch.bfloat16)
    assert all(torch.equal(open_checkpoint(tmp_path / "out")[n], t) for n, t in wanted.items())


@pytest.mark.parametrize(
    "given",
    ["experts=[cars,svhn]", "experts={cars: cars, svhn: svhn}", "experts=@list.txt", "experts=@named.txt"],
)
def test_experts_may_be_given_in_several_ways(given: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, experts = three(llama, tmp_path)
    (tmp_path / "list.txt").write_text("# two\ncars\n\n  svhn\n")
    (tmp_path / "named.txt").write_text("cars=cars\nsvhn = svhn\n")
    command(tmp_path, "base=base", given, "out=out", "merger=dare", "seed=3", "overwrite=true")
    wanted = merge_state_dicts(base, experts, DARE(seed=3))
    assert all(torch.equal(open_checkpoint(tmp_path / "out")[n], t) for n, t in wanted.items())


def test_other_runs_do_not_know_these_keys() -> None:
    cfg, _ = composed(["+experiment=quickstart"])
    assert not {"base", "out", "recipe"} & set(cfg)
    cfg, _ = composed(["+experiment=merge_checkpoints"])
    assert not {"backbone", "suite", "optimizer", "training", "store"} & set(cfg)


def test_this_stage_loads_no_framework_for_training(tmp_path) -> None:
    base, experts = three(llama, tmp_path)
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
        (["experts=[a]", "out=o", "merger=ties"], "base is not set"),
        (["base=base", "out=o", "merger=ties"], "experts is not set"),
        (["base=base", "experts=[]", "out=o", "merger=ties"], "experts is not set"),
        (["base=base", "experts=cars", "out=o", "merger=ties"], r"give a list, experts=\[cars\]"),
        (["base=base", "experts=[null]", "out=o", "merger=ties"], "experts holds None, which is no path"),
        (["base=base", "experts=@binary.txt", "out=o", "merger=ties"], r"binary\.txt cannot be read"),
        (["base=base", "experts=[cars]", f"out={'o' * 300}", "merger=ties"], "is no place for a folder"),
        (["base=base", "experts=@nowhere.txt", "out=o", "merger=ties"], r"there is no file nowhere\.txt"),
        (["base=base", "experts=[cars]", "out=o"], "no merger is set"),
        (["base=base", "experts=[cars]", "merger=ties"], "out is not set"),
        (["base=base", "experts=[cars]", "out=o", "merger=fisher"], "needs a fisher checkpoint"),
        (["base=base", "experts=[cars]", "out=o", "merger=ties", "merger.density=3"], r"must be in \(0, 1\]"),
        (["base=base", "experts=[cars]", "out=o", "merger=ties", "device=0.5"], "device is 0.5; it must be"),
        (["base=base", "experts=[cars]", "out=o", "merger=ties", "device=7"], "cuda:7.* is not there"),
        (["base=base", "experts=[cars]", "merger=ties", "dry_run=true"], "would not work"),
        (["recipe=r.yml", "base=base"], "says what base are"),
        (["recipe=r.yml"], "cannot be read"),
        (["+expert=[cars]"], "unknown key 'expert'.*did you mean 'experts'"),
        (["stages=[merge_checkpoints,report]"], "runs alone"),
        (
            ["overwrite=perhaps", "base=base", "experts=[cars]"],
            "overwrite is 'perhaps'; it must be of type bool",
        ),
        (["backbone=clip_vit_b32"], "unknown key 'backbone'"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(llama(), tmp_path / "base")
    save(tuned(llama(), 1), tmp_path / "cars")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=message):
        command(tmp_path, *arguments)
    assert not (tmp_path / "o").exists()


def test_without_its_experiment_the_stage_says_what_to_run(tmp_path) -> None:
    cfg, choices = composed(["stage=merge_checkpoints"])
    with pytest.raises(InputError, match=r"run \+experiment=merge_checkpoints"):
        run(cfg, tmp_path, choices, [])


# --- dry runs and kills -----------------------------------------------------------------------------------


def huge(folder: Path, rows: int = 1 << 22) -> Path:
    """A model of 100 GB as files know it: headers and holes."""
    folder.mkdir()
    shape, name, weight_map = [rows, 2048], "model.layers.{}.mlp.up_proj.weight", {}
    for n in range(6):
        header = {name.format(n): {"dtype": "BF16", "shape": shape, "data_offsets": [0, rows * 4096]}}
        text = json.dumps(header).encode()
        with (folder / f"model-{n}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + rows * 4096)
        weight_map[name.format(n)] = f"model-{n}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_dry_run_of_a_model_that_fits_nowhere_takes_seconds(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    base, expert = huge(tmp_path / "base"), huge(tmp_path / "expert")
    begun = time.monotonic()
    arguments = (f"base={base}", f"experts=[{expert}]", "merger=task_arithmetic", "dry_run=true")
    command(tmp_path, *arguments, f"out={tmp_path / 'out'}")
    assert time.monotonic() - begun < 20
    said = capsys.readouterr().out
    assert "6 tensors in 6 files, 103.1 GB of disk" in said
    assert "The merge would work." in said
    monkeypatch.undo()
    with pytest.raises(InputError, match="would not work"):
        command(tmp_path, *arguments, "out=/proc/x")
    assert "PROBLEM" in capsys.readouterr().out


def test_a_dry_run_reads_no_tensor_and_says_what_there_is(tmp_path, capsys, monkeypatch) -> None:
    from peft import LoraConfig, get_peft_model

    base, experts = three(lambda: llama(tied=True), tmp_path)
    adapted = get_peft_model(
        llama(tied=True), LoraConfig(r=3, target_modules=["q_proj", "v_proj"], use_rslora=True)
    )
    adapted.save_pretrained(tmp_path / "adapter")

    def refuse(self, name):
        raise AssertionError(f"{name} was read")

    for kind in [Checkpoint, *all_subclasses(Checkpoint)]:
        if "__getitem__" in vars(kind):
            monkeypatch.setattr(kind, "__getitem__", refuse)
    two = f"experts=[{experts['cars']},{tmp_path / 'adapter'}]"
    command(tmp_path, f"base={base}", two, f"out={tmp_path / 'out'}", "merger=tsvm", "dry_run=true")
    said = capsys.readouterr().out
    facts = ["rsLoRA of rank 3 on 4 tensors: 2 × q_proj, 2 × v_proj", "tied by the configuration"]
    facts += [
        "model.embed_tokens.weight: 36 × 16, float32\n",
        "layers.*.mlp.up_proj.weight: 24 × 16, float32 (2 of",
    ]
    needs = ["host memory: at most", "time: about", "The merge would work."]
    for text in [*facts, "vocabulary: 36, 36 tokens", *needs]:
        assert text in said
    assert not (tmp_path / "out").exists()


def all_subclasses(kind: type) -> list[type]:
    return [s for direct in kind.__subclasses__() for s in (direct, *all_subclasses(direct))]


@pytest.mark.parametrize(
    ("expert", "extra", "problem"),
    [
        ("short", [], r"short lacks 9 tensors \(model.layers.1"),
        ("cars", ["merger=fisher"], r"needs a fisher checkpoint for every expert: fishers=\[…\]"),
        ("cars", ["exclude=['*.nope']"], r"'\*\.nope' matches no floating-point tensor"),
        ("cars", ["merger=slerp"], "SLERP goes from one expert to another; it was given 1"),
    ],
)
def test_a_dry_run_names_the_problems_and_fails(expert, extra, problem, tmp_path, capsys) -> None:
    base, _ = three(llama, tmp_path)
    save(llama(layers=1), tmp_path / "short")
    with pytest.raises(InputError, match="would not work"):
        command(
            tmp_path, f"base={base}", f"experts=[{tmp_path / expert}]", "merger=ties", "dry_run=true", *extra
        )
    assert re.search("PROBLEM: .*" + problem, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ([], r"PROBLEM: the vocabularies differ in (.|\n)*embeddings=intersect (.|\n)*embeddings=base "),
        (["embeddings=base", "tokenizer_from=nowhere"], "PROBLEM: tokenizer_from=nowhere is no folder"),
        (["embeddings=pads"], "PROBLEM: embeddings is 'pads'; did you mean 'pad'"),
    ],
)
def test_a_dry_run_reports_all_else_where_vocabularies_do_not_fit(extra, problem, tmp_path, capsys) -> None:
    base, _ = three(llama, tmp_path)
    longer = save(tuned(llama(vocabulary=38), 3), tmp_path / "longer")
    arguments = [f"base={base}", f"experts=[{longer}]", "merger=ties", f"out={tmp_path / 'out'}", *extra]
    with pytest.raises(InputError, match="would not work"):
        command(tmp_path, *arguments, "dry_run=true")
    said = capsys.readouterr().out
    assert re.search(problem, said)
    for text in (
        "longer: 21 tensors",
        "mlp.up_proj.weight: 24 × 16",
        "of disk",
        "host memory: at most",
        "time:",
    ):
        assert text in said


class Refusing(TaskArithmetic):
    """A method that finds out late."""

    def merge(self, name, base, deltas, site):
        raise InputError("refused late")


LAYER = {"layers.0.big": torch.randn(6, 6), "q_proj.weight": torch.randn(4, 4)}
COMPLEX = {**LAYER, "c": torch.zeros(2, dtype=torch.complex64)}


@pytest.mark.parametrize(
    ("method", "state", "options", "message"),
    [
        (TaskArithmetic(), LAYER, {"out": "full"}, "exists and is not empty"),
        (TaskArithmetic(), LAYER, {"out": "full/file/out"}, "is a file"),
        (TaskArithmetic(), LAYER, {"out": "~"}, "is no place for a model"),
        (TaskArithmetic(), LAYER, {"device": "cuda:77"}, "is not there"),
        (TaskArithmetic(weights=[{"no*": 1.0}]), LAYER, {}, "pattern of weights"),
        (TaskArithmetic(), LAYER, {"include": "q*", "exclude": ["q*"]}, "there is nothing to merge"),
        (AdaMerging(learn=Learning()), LAYER, {}, "learns its weights from a model and inputs"),
        (WUDI(), {"layers.0.big": LAYER["layers.0.big"]}, {}, "knows attention and MLP weights by their names"),
        (
            RegMean(),
            LAYER,
            {"statistics": {"gram": [{"k_proj": torch.eye(4)}]}},
            "holds nothing under the names",
        ),
        (TaskArithmetic(), COMPLEX, {}, "complex tensors"),
        (Refusing(), LAYER, {}, "refused late"),
    ],
)
def test_what_a_merge_refuses_its_dry_run_names(method, state, options, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    options = {"device": "cpu", "out": "out", **options}
    out = options.pop("out")
    with pytest.raises(InputError, match=message):
        mergekit_lab.merge(state, [state], out, method, **options)
    problems = report(prepare(state, [state], method, read=False, **options), Path(out)).problems
    assert len(problems) == 1
    assert re.search(message, problems[0])


@pytest.mark.parametrize(
    ("method", "side"),
    [(WUDI(iterations=1), {}), (RegMean(), {"statistics": {"gram": [{"q_proj": torch.eye(4)}]}})],
)
def test_an_estimate_on_made_up_tensors_stands_in_no_merges_way(method, side, tmp_path) -> None:
    prepared = prepare(LAYER, [LAYER], method, read=False, device="cpu", **side)
    assert report(prepared, tmp_path / "out").problems == []


MEASURE = """
import re, threading, time
from pathlib import Path
import torch
import mergekit_lab
from mergekit_lab.merging import TIES
from mergekit_lab.stages.checkpoint_inputs import prepare
from mergekit_lab.stages.estimate import report

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def watch():
    global peak
    while not over.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

torch.set_num_threads(1)
for name in ("small", "large"):
    inputs = f"{name}/base", [f"{name}/0", f"{name}/1"]
    lines = report(prepare(*inputs, TIES(), read=False, device="cpu"), Path("x")).lines
    start, over = anonymous(), threading.Event()
    peak, watching = start, threading.Thread(target=watch)
    watching.start()
    mergekit_lab.merge(*inputs, f"out_{name}", TIES(), device="cpu")
    over.set()
    watching.join()
    print(peak - start, 1e6 * float(re.search(r"at most ([\\d.]+) MB", "".join(lines))[1]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what Linux tells of a process")
def test_the_memory_that_a_dry_run_foretells_is_enough_and_not_far_off(tmp_path) -> None:
    for name, tensors, *shape in (("small", 1, 8, 64), ("large", 9, 500, 1000)):
        for model in ("base", "0", "1"):
            (tmp_path / name / model).mkdir(parents=True)
            state = {f"layers.{n}.w": torch.rand(shape) for n in range(tensors)}
            write_tensors(tmp_path / name / model / "model.safetensors", state)
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    small, large = ([float(number) for number in line.split()] for line in done.stdout.splitlines())
    assert small[0] <= small[1] < 10e6
    assert large[0] <= large[1] < 5 * large[0]


def test_a_merge_that_is_killed_leaves_nothing_that_looks_finished(tmp_path) -> None:
    base, experts = three(llama, tmp_path / "in")
    script = (
        "import os, sys, mergekit_lab\nfrom mergekit_lab.checkpoints import shards\n"
        "from mergekit_lab.merging import TIES\nwrite, done = shards.ShardedWriter.write, []\n"
        "def slow(self, name, tensor):\n    write(self, name, tensor)\n    done.append(name)\n"
        "    if len(done) == 12: print('half', flush=True); __import__('time').sleep(60)\n"
        "shards.ShardedWriter.write = slow\n"
        f"mergekit_lab.merge({str(base)!r}, [{str(experts['cars'])!r}], {str(tmp_path / 'here/out')!r}, TIES(),"
        " max_shard_bytes=4000)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = (tmp_path / "here").iterdir()
    assert left.name.startswith(".out.")
    assert not (left / "config.json").exists()
    with pytest.raises(InputError):
        open_checkpoint(left)
    mergekit_lab.merge(base, experts, tmp_path / "here/out", TIES())
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["out"]
