"""From checkpoints to a folder that loads, and computes what the merged state dict does."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints.models import (
    VOCABULARY,
    clip,
    make_bert,
    make_gpt2,
    make_llama,
    make_t5,
    make_t5_1_1,
    save,
    save_three,
    tune,
    write_tensors_of,
)

import mergekit_lab
from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.merging import (
    DARE,
    SLERP,
    TIES,
    EpiMer,
    Fisher,
    TaskArithmetic,
    WeightAverage,
    merge_state_dicts,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's call
IDS = torch.tensor([[3, 7, 11, 5, 2], [9, 1, 4, 8, 6]])
PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
METHOD = TIES(preset="mergekit", density=0.4, weights=[0.6, 0.9])
METHOD_OF_ONE = TaskArithmetic(coefficient=0.5)


def compute_text_logits(model):
    return model(input_ids=IDS).logits


def compute_t5_logits(model):
    return model(input_ids=IDS, decoder_input_ids=IDS[:, :3]).logits


def clip_logits(model):
    return model(input_ids=IDS, pixel_values=PIXELS).logits_per_image


HF = {
    "llama": (make_llama, "AutoModelForCausalLM", compute_text_logits),
    "tied llama": (lambda: make_llama(tied=True), "AutoModelForCausalLM", compute_text_logits),
    "t5": (make_t5, "AutoModelForSeq2SeqLM", compute_t5_logits),
    "t5 1.1": (make_t5_1_1, "AutoModelForSeq2SeqLM", compute_t5_logits),
    "gpt2": (make_gpt2, "AutoModelForCausalLM", compute_text_logits),
    "bert": (make_bert, "AutoModelForMaskedLM", compute_text_logits),
    "clip": (clip, "AutoModel", clip_logits),
}


@pytest.mark.parametrize("case", HF)
def test_what_transformers_loads_back_computes_what_the_merged_state_dict_does(case: str, tmp_path) -> None:
    import transformers

    make, loader, logits = HF[case]
    base, experts = save_three(make, tmp_path)
    out = mergekit_lab.merge(base, experts, tmp_path / "out", METHOD, device="cpu", max_shard_bytes=9000)
    assert (out / "model.safetensors.index.json").is_file()
    loaded, info = getattr(transformers, loader).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    states = [make().state_dict(), *(tune(make(), seed).state_dict() for seed in (1, 2))]
    wanted = make()
    wanted.load_state_dict(merge_state_dicts(states[0], dict(zip(experts, states[1:], strict=True)), METHOD))
    with torch.no_grad():
        torch.testing.assert_close(logits(loaded.eval()), logits(wanted), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(logits(wanted), logits(make()), atol=1e-3)
    assert sorted(open_checkpoint(out)) == sorted(open_checkpoint(base))
    assert transformers.AutoTokenizer.from_pretrained(out).vocab_size == VOCABULARY


def test_tied_weights_come_back_tied(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    base, experts = save_three(lambda: make_llama(tied=True), tmp_path)
    for folder in (base, *experts.values()):
        state = dict(open_checkpoint(folder)) | {
            "lm_head.weight": open_checkpoint(folder)["model.embed_tokens.weight"]
        }
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        write_tensors(folder / "model.safetensors", state)
    out = mergekit_lab.merge(base, experts, tmp_path / "out", DARE(density=0.5), device="cpu")
    assert "lm_head.weight" not in open_checkpoint(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_what_a_model_computes_is_not_merged(tmp_path) -> None:
    """As older versions wrote GPT-2: causal masks among the weights."""
    from transformers import GPT2LMHeadModel

    mask = torch.ones(1, 1, 32, 32).tril().bool()
    older = {f"transformer.h.{n}.attn.bias": mask for n in range(2)}
    older |= {f"transformer.h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}
    base, expert = (save(tune(make_gpt2(), seed), tmp_path / str(seed), "1MB") for seed in (0, 1))
    state = dict(open_checkpoint(expert))
    write_tensors(base / "model.safetensors", dict(open_checkpoint(base)) | older)
    masks = {name: torch.tensor(-1e9) if "masked" in name else mask.float() for name in older}
    write_tensors(tmp_path / "other.safetensors", state | masks)
    for experts in ([expert], [tmp_path / "other.safetensors"]):
        out = mergekit_lab.merge(base, experts, tmp_path / "out", METHOD_OF_ONE, device="cpu", overwrite=True)
        merged = open_checkpoint(out)
        assert all(torch.equal(merged[name], value) for name, value in older.items())
        _, info = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"]
        name = "transformer.wte.weight"
        torch.testing.assert_close(merged[name], (open_checkpoint(base)[name] + state[name]) / 2)


def test_an_adapter_and_a_folder_merge_like_the_dense_models_they_stand_for(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    base, experts = save_three(make_llama, tmp_path)
    adapted = get_peft_model(
        make_llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
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
    with pytest.raises(InputError, match="is a PEFT adapter"):
        mergekit_lab.merge(tmp_path / "adapter", experts, tmp_path / "out2", method)


def test_patterns_dtype_and_side_inputs_reach_the_merge(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
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

    base, experts = save_three(make_llama, tmp_path)
    tokens = [f"t{n}" for n in range(38)]
    experts["chat"] = write_tensors_of(tune(make_llama(vocabulary=38), 3), tmp_path / "chat", tokens)
    with pytest.raises(InputError, match="embeddings=intersect"):
        mergekit_lab.merge(base, experts, tmp_path / "out", WeightAverage())
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
    base, experts = save_three(make_llama, tmp_path)
    out = mergekit_lab.merge(
        base,
        experts,
        tmp_path / "out",
        DARE(density=0.7, inner=METHOD),
        device="cpu",
        metrics={"accuracy": 0.75},
    )
    card, record = (out / "README.md").read_text(), json.loads((out / "mergekit_lab.json").read_text())
    rows = [
        "inner.preset | mergekit",
        "inner.density | 0.4",
        "density | 0.7",
        "seed | 0",
        "inner.coefficient | 1.0",
    ]
    for row in [*rows, "accuracy | 0.75", "cars | cars | model-00001-of"]:
        assert f"| {row}" in card
    assert "**DARE**" in card
    assert record["versions"]["torch"] == torch.__version__
    shard = next(base.glob("model-00001*"))
    from mergekit_lab.checkpoints import hash_file

    assert record["base"]["files"][shard.name]["sha256"] == hash_file(shard)
    for text in (card, json.dumps(record)):
        assert str(tmp_path) not in text
        assert str(Path.home()) not in text


@pytest.mark.parametrize("format", ["dense", "low_rank"])
def test_the_card_tells_what_the_method_noted_of_the_tensors(format: str, tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    base, cars, svhn, fisher = (
        {
            "a": torch.rand(8, 8, generator=generator),
            "b": torch.rand(6, 6, generator=generator),
            "c": torch.rand(1, 4),
        }
        for _ in range(4)
    )
    notes: dict[str, dict[str, object]] = {}
    merge_state_dicts(base, [cars, svhn], EpiMer(rank=2), fishers=[fisher, fisher], notes=notes)
    out = mergekit_lab.merge(
        base, [cars, svhn], tmp_path / "out", EpiMer(rank=2), fishers=[fisher, fisher], device="cpu",
        format=format,
    )  # fmt: skip
    low, high = sorted(float(str(notes[name]["eta"])) for name in "ab")
    line = f"eta: {(low + high) / 2:.4g} in the mean of 2 tensors, from {low:.4g} to {high:.4g}"
    for text in (out / "README.md", out / "mergekit_lab.json"):
        assert line in text.read_text()
        assert "the base stays (1 tensors: c)" in text.read_text()


def test_methods_that_take_whole_tensors_stream_too(tmp_path) -> None:
    base, experts = save_three(make_llama, tmp_path)
    out = mergekit_lab.merge(base, experts, tmp_path / "out", SLERP(t=0.3), device="cpu", progress=True)
    wanted = merge_state_dicts(base, experts, SLERP(t=0.3))
    assert all(torch.equal(open_checkpoint(out)[n], t) for n, t in wanted.items())


@pytest.mark.parametrize("buffers", ["merge", "base"])
def test_batch_norms_statistics_are_merged_or_stay_and_its_counter_is_the_bases(buffers, tmp_path) -> None:
    def make_state(seed: int) -> dict:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        for _ in range(1 + seed):
            net(torch.randn(5, 3))
        return net.state_dict()

    states = [make_state(seed) for seed in range(3)]
    files = [tmp_path / f"{seed}.safetensors" for seed in range(3)]
    for file, state in zip(files, states, strict=True):
        write_tensors(file, state)
    base, *experts = files
    out = mergekit_lab.merge(base, experts, tmp_path / "out", WeightAverage(), buffers=buffers, device="cpu")
    merged = open_checkpoint(out / "model.safetensors")
    wanted = (states[1]["1.running_var"] + states[2]["1.running_var"]) / 2
    torch.testing.assert_close(
        merged["1.running_var"], wanted if buffers == "merge" else states[0]["1.running_var"]
    )
    assert merged["1.num_batches_tracked"] == 1
