"""A dry run of a merge of checkpoints: what it says without reading, and the problems it names."""

import json
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints.models import make_llama, save, save_three, tune
from composing import merge_command

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import Checkpoint, write_tensors
from mergekit_lab.commands.dry_run import report
from mergekit_lab.commands.prepare import prepare
from mergekit_lab.merging import (
    DARE,
    DELLA,
    TIES,
    TSVM,
    WUDI,
    AdaMerging,
    ConsensusTA,
    Learning,
    Method,
    RegMean,
    TaskArithmetic,
    WeightAverage,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's call
METHOD_OF_ONE = TaskArithmetic(coefficient=0.5)


def test_a_dry_run_tells_buffers_that_are_computed_from_those_that_must_agree(tmp_path) -> None:
    base = {"w": torch.ones(2), "e.position_ids": torch.arange(3)[None], "steps": torch.tensor(1)}
    expert = {name: base[name] for name in ("w", "steps")}
    dry = report(prepare(base, [expert], METHOD_OF_ONE, read=False, device="cpu"), tmp_path / "o")
    assert dry.works
    assert "whatever experts have: e.position_ids" in dry.format_text()
    assert "1 integer buffers, copied" in dry.format_text()
    assert "from the base: e.position_ids" in dry.format_text()


def test_a_dry_run_foretells_the_size_of_factors(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    method = TSVM(rank=2)
    factors = mergekit_lab.merge(base, experts, tmp_path / "out", method, device="cpu", format="low_rank")
    specs = open_checkpoint(factors / "factors.safetensors").specs
    size = sum(spec.nbytes for spec in specs.values())
    text = report(
        prepare(base, experts, method, read=False, device="cpu"), tmp_path / "o", format="low_rank"
    ).format_text()
    assert f"{len(specs)} tensors in 1 files, {size / 1000:.1f} kB of disk" in text


@pytest.mark.parametrize(
    "method",
    [
        ConsensusTA(tall={"cars": 0.3, "dtd": 0.4}),
        DARE(inner=TIES(weights={"cars": 1.0, "dtd": 0.5})),
        DELLA(inner=TaskArithmetic(weights=[{"*.b": 0.3}, 1.0])),
    ],
    ids=["tall", "inner", "pattern"],
)
def test_numbers_by_name_do_not_stand_in_the_way_of_a_dry_run(tmp_path, method: Method) -> None:
    base = {"layers.0.w": torch.ones(3, 3), "layers.0.b": torch.ones(3)}
    experts = {name: {n: v + 1 for n, v in base.items()} for name in ("cars", "dtd")}
    dry = report(prepare(base, experts, method, read=False, device="cpu"), tmp_path / "o")
    assert dry.works, dry.problems
    assert "unknown" not in dry.format_text()


def test_a_dry_run_refuses_a_weight_average_without_a_sum(tmp_path) -> None:
    base = {"w": torch.ones(2)}
    method = WeightAverage(weights=[1.0, -1.0])
    dry = report(prepare(base, [base, base], method, read=False, device="cpu"), tmp_path / "o")
    assert dry.problems == ["the weights of a weight average, [1.0, -1.0], sum to zero"]


def write_huge(folder: Path, rows: int = 1 << 22) -> Path:
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
    base, expert = write_huge(tmp_path / "base"), write_huge(tmp_path / "expert")
    begun = time.monotonic()
    arguments = (f"base={base}", f"experts=[{expert}]", "merger=task_arithmetic", "dry_run=true")
    merge_command(tmp_path, *arguments, f"out={tmp_path / 'out'}")
    assert time.monotonic() - begun < 20
    printed = capsys.readouterr().out
    assert "6 files, 103.1 GB" in printed
    assert "The merge would work." in printed
    monkeypatch.undo()
    with pytest.raises(InputError, match="would not work"):
        merge_command(tmp_path, *arguments, "out=/proc/x")
    assert "PROBLEM" in capsys.readouterr().out


def test_a_dry_run_reads_no_tensor_and_says_what_there_is(tmp_path, capsys, monkeypatch) -> None:
    from peft import LoraConfig, get_peft_model

    base, experts = save_three(lambda: make_llama(tied=True), tmp_path)
    adapted = get_peft_model(
        make_llama(tied=True), LoraConfig(r=3, target_modules=["q_proj", "v_proj"], use_rslora=True)
    )
    adapted.save_pretrained(tmp_path / "adapter")

    def refuse(self, name):
        raise AssertionError(f"{name} was read")

    for cls in [Checkpoint, *list_subclasses(Checkpoint)]:
        if "__getitem__" in vars(cls):
            monkeypatch.setattr(cls, "__getitem__", refuse)
    two = f"experts=[{experts['cars']},{tmp_path / 'adapter'}]"
    merge_command(tmp_path, f"base={base}", two, f"out={tmp_path / 'out'}", "merger=tsvm", "dry_run=true")
    printed = capsys.readouterr().out
    facts = ["rsLoRA of rank 3 on 4 tensors: 2 × q_proj, 2 × v_proj", "tied by the configuration"]
    facts += [
        "model.embed_tokens.weight: 36 × 16, float32\n",
        "layers.*.mlp.up_proj.weight: 24 × 16, float32 (2 of",
    ]
    needs = ["host memory: at most", "time: about", "The merge would work."]
    for text in [*facts, "vocabulary: 36, 36 tokens", *needs]:
        assert text in printed
    assert not (tmp_path / "out").exists()


def list_subclasses(cls: type) -> list[type]:
    return [s for direct in cls.__subclasses__() for s in (direct, *list_subclasses(direct))]


@pytest.mark.parametrize(
    ("expert", "extra", "problem"),
    [
        ("short", [], r"short.*lacks 9 tensors.*model.layers.1"),
        ("cars", ["merger=fisher"], r"needs a fisher checkpoint for every expert: give fishers=\[…\]"),
        ("cars", ["exclude=['*.nope']"], r"'\*\.nope' matches no floating-point tensor"),
        ("cars", ["merger=slerp"], "SLERP takes exactly two experts, not 1"),
    ],
)
def test_a_dry_run_names_the_problems_and_fails(expert, extra, problem, tmp_path, capsys) -> None:
    base, _ = save_three(make_llama, tmp_path)
    save(make_llama(layers=1), tmp_path / "short")
    with pytest.raises(InputError, match="would not work"):
        merge_command(
            tmp_path, f"base={base}", f"experts=[{tmp_path / expert}]", "merger=ties", "dry_run=true", *extra
        )
    assert re.search("PROBLEM: .*" + problem, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ([], r"PROBLEM: the vocabularies differ in (.|\n)*embeddings=intersect (.|\n)*embeddings=base "),
        (["embeddings=base", "tokenizer_from=nowhere"], "PROBLEM: tokenizer_from=nowhere"),
    ],
)
def test_a_dry_run_reports_all_else_where_vocabularies_do_not_fit(extra, problem, tmp_path, capsys) -> None:
    base, _ = save_three(make_llama, tmp_path)
    longer = save(tune(make_llama(vocabulary=38), 3), tmp_path / "longer")
    arguments = [f"base={base}", f"experts=[{longer}]", "merger=ties", f"out={tmp_path / 'out'}", *extra]
    with pytest.raises(InputError, match="would not work"):
        merge_command(tmp_path, *arguments, "dry_run=true")
    printed = capsys.readouterr().out
    assert re.search(problem, printed)
    assert printed.count("PROBLEM") == 1
    for text in (
        "longer: 21 tensors",
        "mlp.up_proj.weight: 24 × 16",
        "of disk",
        "host memory: at most",
        "time:",
    ):
        assert text in printed


class Refusing(TaskArithmetic):
    """A method that finds out late."""

    def merge(self, name, base, deltas, site):
        raise InputError("refused late")


LAYER = {"layers.0.big": torch.randn(6, 6), "q_proj.weight": torch.randn(4, 4)}
COMPLEX = {**LAYER, "c": torch.zeros(2, dtype=torch.complex128)}


@pytest.mark.parametrize(
    ("method", "state", "options", "message"),
    [
        (TaskArithmetic(), LAYER, {"out": "full"}, "exists and is not empty"),
        (TaskArithmetic(), LAYER, {"out": "full/file/out"}, "is a file"),
        (TaskArithmetic(), LAYER, {"out": "~"}, "cannot hold a model"),
        (TaskArithmetic(), LAYER, {"device": "cuda:77"}, "does not exist"),
        (TaskArithmetic(weights=[{"no*": 1.0}]), LAYER, {}, "pattern of weights"),
        (TaskArithmetic(), LAYER, {"include": "q*", "exclude": ["q*"]}, "there is nothing to merge"),
        (AdaMerging(learn=Learning()), LAYER, {}, "learns its weights from"),
        (WUDI(), {"layers.0.big": LAYER["layers.0.big"]}, {}, "knows attention and MLP"),
        (
            RegMean(),
            LAYER,
            {"statistics": {"gram": [{"k_proj": torch.eye(4)}]}},
            "holds nothing under the names",
        ),
        (TaskArithmetic(), COMPLEX, {}, r"complex128, which safetensors cannot hold"),
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
    [(WUDI(steps=1), {}), (RegMean(), {"statistics": {"gram": [{"q_proj": torch.eye(4)}]}})],
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
from mergekit_lab.commands.prepare import prepare
from mergekit_lab.commands.dry_run import report

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
