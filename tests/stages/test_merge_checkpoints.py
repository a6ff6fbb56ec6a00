"""From checkpoints to a folder that loads: the same numbers, whole or not at all, and every mistake by name."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints.models import (
    OPEN_CLIP,
    VOCABULARY,
    bert,
    clip,
    llama,
    open_clip_model,
    save,
    t5,
    tuned,
    write_tensors_of,
)
from stages.conftest import composed

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import Checkpoint, write_tensors
from mergekit_lab.merging import DARE, SLERP, TIES, Fisher, TaskArithmetic, WeightAverage, merge_state_dicts
from mergekit_lab.stages import run

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's call
IDS = torch.tensor([[3, 7, 11, 5, 2], [9, 1, 4, 8, 6]])
PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
METHOD = TIES(preset="mergekit", density=0.4, weights=[0.6, 0.9])


def text_logits(model):
    return model(input_ids=IDS).logits


def t5_logits(model):
    return model(input_ids=IDS, decoder_input_ids=IDS[:, :3]).logits


def clip_logits(model):
    return model(input_ids=IDS, pixel_values=PIXELS).logits_per_image


HF = {
    "llama": (llama, "AutoModelForCausalLM", text_logits),
    "tied llama": (lambda: llama(tied=True), "AutoModelForCausalLM", text_logits),
    "t5": (t5, "AutoModelForSeq2SeqLM", t5_logits),
    "bert": (bert, "AutoModelForMaskedLM", text_logits),
    "clip": (clip, "AutoModel", clip_logits),
}


def three(make, folder: Path) -> tuple[Path, dict[str, Path]]:
    base = save(make(), folder / "base")
    return base, {name: save(tuned(make(), seed), folder / name) for name, seed in (("cars", 1), ("svhn", 2))}


@pytest.mark.parametrize("case", HF)
def test_what_transformers_loads_back_computes_what_the_merged_state_dict_does(case: str, tmp_path) -> None:
    import transformers

    make, loader, logits = HF[case]
    base, experts = three(make, tmp_path)
    out = mergekit_lab.merge(base, experts, tmp_path / "out", METHOD, device="cpu", max_shard_bytes=9000)
    assert (out / "model.safetensors.index.json").is_file()
    loaded, info = getattr(transformers, loader).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    states = [make().state_dict(), *(tuned(make(), seed).state_dict() for seed in (1, 2))]
    wanted = make()
    wanted.load_state_dict(merge_state_dicts(states[0], dict(zip(experts, states[1:], strict=True)), METHOD))
    with torch.no_grad():
        torch.testing.assert_close(logits(loaded.eval()), logits(wanted), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(logits(wanted), logits(make()), atol=1e-3)
    assert sorted(open_checkpoint(out)) == sorted(open_checkpoint(base))
    assert transformers.AutoTokenizer.from_pretrained(out).vocab_size == VOCABULARY


def test_tied_weights_come_back_tied(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    base, experts = three(lambda: llama(tied=True), tmp_path)
    for folder in (base, *experts.values()):
        state = dict(open_checkpoint(folder)) | {
            "lm_head.weight": open_checkpoint(folder)["model.embed_tokens.weight"]
        }
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        write_tensors(folder / "model.safetensors", state)
    out = mergekit_lab.merge(base, experts, tmp_path / "out", DARE(drop=0.5), device="cpu")
    assert "lm_head.weight" not in open_checkpoint(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["pt", "state_dict", "folder"])
def test_what_open_clip_loads_back_computes_what_the_merged_state_dict_does(kind: str, tmp_path) -> None:
    import open_clip

    states = [open_clip_model().state_dict(), *(tuned(open_clip_model(), seed).state_dict() for seed in (1, 2))]
    sources: list = list(states)
    if kind == "pt":
        sources = [tmp_path / f"{n}.pt" for n in range(3)]
        torch.save(states[0], sources[0])
        torch.save({"state_dict": {f"module.{n}": t for n, t in states[1].items()}, "epoch": 3}, sources[1])
        torch.save(states[2], sources[2])
    if kind == "folder":
        sources = [tmp_path / str(n) for n in range(3)]
        for folder, state in zip(sources, states, strict=True):
            folder.mkdir()
            write_tensors(folder / "open_clip_model.safetensors", state)
            (folder / "open_clip_config.json").write_text(
                json.dumps({"model_cfg": OPEN_CLIP, "preprocess_cfg": {}})
            )
    out = mergekit_lab.merge(
        sources[0], {"cars": sources[1], "svhn": sources[2]}, tmp_path / "out", METHOD, device="cpu",
        max_shard_bytes=1000 if kind == "folder" else 10**9,
    )  # fmt: skip
    if kind == "folder":
        loaded = open_clip.create_model(f"local-dir:{out}").eval()
    else:
        loaded = open_clip.CLIP(**OPEN_CLIP).eval()
        open_clip.load_checkpoint(loaded, str(out / "model.safetensors"))
    wanted = open_clip_model()
    wanted.load_state_dict(
        merge_state_dicts(states[0], dict(zip(("cars", "svhn"), states[1:], strict=True)), METHOD)
    )
    text = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        for ours, theirs in zip(loaded(PIXELS, text), wanted(PIXELS, text), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_adapter_and_a_folder_merge_like_the_dense_models_they_stand_for(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    base, experts = three(llama, tmp_path)
    adapted = get_peft_model(
        llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    dense = adapted.merge_and_unload().state_dict()
    method = TaskArithmetic(coefficient=0.5)
    out = mergekit_lab.merge(
        base, [experts["cars"], tmp_path / "adapter"], tmp_path / "out", method, device="cpu"
    )
    wanted = merge_state_dicts(base, [experts["cars"], dense], method)
    for name, value in wanted.items():
        torch.testing.assert_close(open_checkpoint(out)[name], value, rtol=1e-5, atol=1e-7)
    with pytest.raises(InputError, match="is an adapter: the base is the model"):
        mergekit_lab.merge(tmp_path / "adapter", experts, tmp_path / "out2", method)


def test_patterns_dtype_and_side_inputs_reach_the_merge(tmp_path) -> None:
    base, experts = three(llama, tmp_path)
    fishers = []
    for name in experts:
        values = {n: torch.rand(s.shape) for n, s in open_checkpoint(base).specs.items()}
        write_tensors(tmp_path / f"{name}.safetensors", values)
        fishers.append(tmp_path / f"{name}.safetensors")
    out = mergekit_lab.merge(
        base, experts, tmp_path / "out", Fisher(), fishers=fishers, include=["*.mlp.*", "*embed*"],
        exclude=["*.1.*"], dtype="bfloat16", device="cpu",
    )  # fmt: skip
    before = open_checkpoint(base)
    whole = merge_state_dicts(base, experts, Fisher(), fishers=fishers)
    for name, value in open_checkpoint(out).items():
        merged = "embed" in name or (".mlp." in name and ".1." not in name)
        assert torch.equal(value, (whole if merged else before)[name].bfloat16()), name
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(("choice", "rows"), [("intersect", VOCABULARY), ("pad", 38), ("base", VOCABULARY)])
def test_other_vocabularies_merge_as_chosen_and_load_with_their_tokenizer(choice, rows, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, experts = three(llama, tmp_path)
    tokens = [f"t{n}" for n in range(38)]
    experts["chat"] = write_tensors_of(tuned(llama(vocabulary=38), 3), tmp_path / "chat", tokens)
    with pytest.raises(InputError, match="embeddings=intersect"):
        mergekit_lab.merge(base, experts, tmp_path / "out", METHOD)
    assert not (tmp_path / "out").exists()
    out = mergekit_lab.merge(
        base, experts, tmp_path / "out", WeightAverage(), embeddings=choice, device="cpu", dtype="float32"
    )
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == rows
    assert len(AutoTokenizer.from_pretrained(out)) == rows
    head = model.lm_head.weight
    states = {name: open_checkpoint(path)["lm_head.weight"] for name, path in experts.items()}
    shared = sum(state[:VOCABULARY] for state in states.values()) / 3
    if choice == "base":
        shared = open_checkpoint(base)["lm_head.weight"]
    torch.testing.assert_close(head[:VOCABULARY], shared)
    if rows == 38:
        torch.testing.assert_close(head[36:], states["chat"][36:])


def test_the_card_says_what_was_done_and_no_path_of_this_machine(tmp_path) -> None:
    base, experts = three(llama, tmp_path)
    out = mergekit_lab.merge(
        base, experts, tmp_path / "out", DARE(drop=0.3, inner=METHOD), device="cpu", metrics={"accuracy": 0.75}
    )
    card, record = (out / "README.md").read_text(), json.loads((out / "mergekit_lab.json").read_text())
    rows = [
        "inner.preset | mergekit",
        "inner.density | 0.4",
        "drop | 0.3",
        "seed | 0",
        "inner.coefficient | 1.0",
    ]
    for row in [*rows, "accuracy | 0.75", "cars | cars | model-00001-of"]:
        assert f"| {row}" in card
    assert "**DARE**" in card
    assert record["versions"]["torch"] == torch.__version__
    shard = next(base.glob("model-00001*"))
    from mergekit_lab.checkpoints import sha256_of

    assert record["base"]["files"][shard.name]["sha256"] == sha256_of(shard)
    for text in (card, json.dumps(record)):
        assert str(tmp_path) not in text
        assert str(Path.home()) not in text


# --- mistakes -------------------------------------------------------------------------------------------


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
        (["cars"], {"device": "cuda:7"}, "cuda:7 is not there"),
        (["cars"], {"include": ["*.nope"]}, r"'\*.nope' matches no"),
        (["cars"], {"tokenizer_from": "nowhere"}, "is no folder and no expert"),
        (["cars"], {"max_shard_bytes": 0}, "max_shard_bytes is 0"),
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
    (tmp_path / "list.txt").write_text("# two\ncars\n\nsvhn  # the second\n")
    (tmp_path / "named.txt").write_text("cars=cars\nsvhn = svhn\n")
    command(tmp_path, "base=base", given, "out=out", "merger=dare", "seed=3", "overwrite=true")
    wanted = merge_state_dicts(base, experts, DARE(seed=3))
    assert all(torch.equal(open_checkpoint(tmp_path / "out")[n], t) for n, t in wanted.items())


def test_other_runs_do_not_know_these_keys() -> None:
    cfg, _ = composed(["+experiment=quickstart"])
    assert not {"base", "experts", "out", "recipe", "dry_run"} & set(cfg)
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
        (["base=base", "experts=@nowhere.txt", "out=o", "merger=ties"], r"there is no file nowhere\.txt"),
        (["base=base", "experts=[cars]", "out=o"], "no merger is set"),
        (["base=base", "experts=[cars]", "merger=ties"], "out is not set"),
        (["base=base", "experts=[cars]", "out=o", "merger=fisher"], "needs a fisher checkpoint"),
        (["base=base", "experts=[cars]", "out=o", "merger=ties", "merger.density=3"], r"must be in \(0, 1\]"),
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


def test_a_dry_run_of_a_model_that_fits_nowhere_takes_seconds(tmp_path, capsys) -> None:
    base, expert = huge(tmp_path / "base"), huge(tmp_path / "expert")
    begun = time.monotonic()
    arguments = (f"base={base}", f"experts=[{expert}]", "merger=task_arithmetic", "dry_run=true")
    command(tmp_path, *arguments)
    assert time.monotonic() - begun < 20
    said = capsys.readouterr().out
    assert "6 tensors in 6 files, 103.1 GB of disk" in said
    assert "The merge would work." in said
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
        ("cars", ["exclude=['*.nope']"], r"'\*\.nope' matches no tensor"),
        ("cars", ["merger=slerp"], "SLERP goes from one expert to another; it was given 1"),
    ],
)
def test_a_dry_run_names_the_problems_and_fails(expert, extra, problem, tmp_path, capsys) -> None:
    import re

    base, _ = three(llama, tmp_path)
    save(llama(layers=1), tmp_path / "short")
    with pytest.raises(InputError, match="would not work"):
        command(
            tmp_path, f"base={base}", f"experts=[{tmp_path / expert}]", "merger=ties", "dry_run=true", *extra
        )
    assert re.search("PROBLEM: .*" + problem, capsys.readouterr().out)


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


def test_methods_that_take_whole_tensors_stream_too(tmp_path) -> None:
    base, experts = three(llama, tmp_path)
    out = mergekit_lab.merge(base, experts, tmp_path / "out", SLERP(t=0.3), device="cpu", progress=True)
    wanted = merge_state_dicts(base, experts, SLERP(t=0.3))
    assert all(torch.equal(open_checkpoint(out)[n], t) for n, t in wanted.items())
