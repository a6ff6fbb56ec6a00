"""mergekit recipes give mergekit's own numbers, folders and tokenizers.

Tests marked `beside` run in an environment that has mergekit: `make test-beside`.
"""

import copy
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints.models import TEXT, make_llama, tune, write_tensors_of
from commands.recipes import CHATS, EXACT, RANDOM, STAGES, START, TOKENIZERS, TWO, merge_here
from composing import merge_command

from mergekit_lab import InputError
from mergekit_lab.checkpoints import open_checkpoint as opened
from mergekit_lab.checkpoints.tokens import read_tokens
from mergekit_lab.commands.recipes import read_recipe

pytestmark = pytest.mark.usefixtures("folder")


def run(text: str, out: Path, *more: str) -> Path:
    (out.parent / "r.yml").write_text(text)
    merge_command(out.parent, "overwrite=true", f"recipe={out.parent}/r.yml", f"out={out}", *more)
    return out


def merge_by_mergekit(text: str, out: Path):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    options = MergeOptions(random_seed=1, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), str(out), options=options)
    return opened(out)


def run_mergekit(test):
    """Their warnings are not ours."""
    there = importlib.util.find_spec("mergekit") is not None
    for mark in (
        pytest.mark.beside,
        pytest.mark.filterwarnings("ignore"),
        pytest.mark.skipif(not there, reason="mergekit is not installed: `make test-beside` has it"),
    ):
        test = mark(test)
    return test


def assert_same(ours, theirs) -> None:
    assert set(theirs) == set(ours)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=3e-7, atol=3e-7, msg=lambda m, n=name: f"{n}: {m}")


@run_mergekit
@pytest.mark.parametrize("case", EXACT)
def test_a_recipe_gives_mergekits_numbers(case: str, tmp_path) -> None:
    assert_same(merge_here(EXACT[case]), merge_by_mergekit(EXACT[case], tmp_path / "out"))


@run_mergekit
@pytest.mark.parametrize("case", STAGES)
def test_documents_that_use_each_others_results_give_mergekits_numbers(case: str, tmp_path) -> None:
    from click.testing import CliRunner
    from mergekit.scripts.multimerge import main

    Path("multi.yml").write_text(STAGES[case])
    paths = [
        "--out-path",
        f"{tmp_path}/theirs",
        "--intermediate-dir",
        str(tmp_path),
        "--quiet",
        "--no-write-model-card",
    ]
    ended = CliRunner().invoke(main, ["multi.yml", *paths])
    assert ended.exit_code == 0, ended.output
    ours, theirs = run(STAGES[case], tmp_path / "ours"), tmp_path / "theirs"
    assert_same(opened(ours), opened(theirs))
    kept = [json.loads((out / "config.json").read_text()) for out in (ours, theirs)]
    assert kept[0]["num_hidden_layers"] == kept[1]["num_hidden_layers"]


@run_mergekit
@pytest.mark.parametrize("case", RANDOM)
def test_a_random_recipe_agrees_with_mergekit_in_distribution(case: str, tmp_path) -> None:
    """One expert: as many entries stay, of the same norms, as much like the task vector."""
    base = opened("base")
    whole = torch.cat([(opened("a")[n] - base[n]).flatten() for n in base])
    lines = RANDOM[case].splitlines()
    text = "\n".join(line for line in lines if not line.startswith("models"))
    text += "\nmodels: [{model: a, parameters: {weight: 1.0, density: 0.3}}]\n"
    numbers = []
    for merged in (merge_by_mergekit(text, tmp_path / "out"), merge_here(text)):
        delta = torch.cat([(merged[n] - base[n]).flatten() for n in base])
        alike = torch.cosine_similarity(delta, whole, dim=0)
        numbers.append([float((delta != 0).float().mean()), float(delta.abs().mean()), float(alike)])
    assert numbers[1] == pytest.approx(numbers[0], rel=0.06)
    assert numbers[1][0] == pytest.approx(0.3, rel=0.05)


def test_recipes_that_need_no_whole_tensors_merge_in_blocks() -> None:
    base = opened("base")
    for case, whole in (("ties", False), ("task arithmetic", False), ("slerp", False), ("model stock", True)):
        Path("recipe.yml").write_text(EXACT[case])
        method = read_recipe(Path("recipe.yml")).make_method(base)
        assert method.elementwise != whole, case


@pytest.mark.parametrize("case", {**EXACT, **RANDOM})
def test_every_recipe_runs_and_draws_are_the_seed_s(case: str) -> None:
    base, text = opened("base"), {**EXACT, **RANDOM}[case]
    merged = merge_here(text, seed=5)
    assert any(not torch.equal(value, base[name]) for name, value in merged.items())
    if case in RANDOM:
        again, other = merge_here(text, seed=5), merge_here(text, seed=6)
        assert all(torch.equal(value, again[name]) for name, value in merged.items())
        assert any(not torch.equal(value, other[name]) for name, value in merged.items())


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (
            START + "models: [{model: a, parameters: {weight: 1e-1}}, {model: b, parameters: {weight: '0.5'}}]",
            START + "models: [{model: a, parameters: {weight: 0.1}}, {model: b, parameters: {weight: 0.5}}]",
        ),
        (
            START + TWO + "parameters: {density: ['0.2', 8e-1]}",
            START + TWO + "parameters: {density: [0.2, 0.8]}",
        ),
        (START + TWO + "chat_template: auto", START + TWO),
        (START + "modules:\n  default:\n    " + TWO, START + TWO),
        (
            START
            + "modules: {default: {slices: [{sources: [{model: a, layer_range: [0, 4], parameters: {weight: "
            "1}}]}]}}",
            START + "models: [{model: a, parameters: {weight: 1}}]",
        ),
        (START + TWO + "slices:\nmodules:\n", START + TWO),
        (
            START
            + TWO.replace("model: a", "model: {model: {path: a}, lora: null, override_architecture: null}"),
            START + TWO,
        ),
        (START + TWO + "parameters: {epsilon: 1}", START + TWO),
        (
            "merge_method: slerp\nparameters: {t: 0.5}\n"
            "slices: [{base_model: base, sources: [{model: a, layer_range: [0, '4']}]}]",
            "merge_method: slerp\nbase_model: base\nparameters: {t: 0.5}\nmodels: [{model: a}]",
        ),
    ],
)
def test_what_mergekit_takes_for_the_same_is_the_same(text: str, same: str) -> None:
    first, second = merge_here(text), merge_here(same)
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_an_adapter_in_a_recipe_belongs_to_the_model_it_is_added_to(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        adapted = get_peft_model(
            tune(make_llama(layers=4), 1), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        )
    adapted.save_pretrained(tmp_path / "lora")
    merged = merge_here(
        f"merge_method: linear\nmodels: [{{model: a+{tmp_path / 'lora'}, parameters: {{weight: 1}}}},"
        " {model: b, parameters: {weight: 1}}]"
    )
    dense = adapted.merge_and_unload().state_dict()
    for name, value in merged.items():
        torch.testing.assert_close(value, (dense[name] + opened("b")[name]) / 2, rtol=1e-5, atol=1e-7)


def test_the_command_runs_a_recipe_and_the_card_has_it(folder, tmp_path) -> None:
    text = (
        EXACT["ties"].replace("model: a", f"model: {folder / 'a'}").replace("int8_mask", "gamma: 0, int8_mask")
    )
    merged = opened(out := run(text, tmp_path / "out"))
    assert all(torch.equal(merged[n], t) for n, t in merge_here(EXACT["ties"]).items())
    card = (out / "README.md").read_text()
    assert "merge_method: ties" in card
    assert "merged by mergekit's **ties**." in card
    assert "| merge_method | ties |" in card
    assert "the recipe's gamma has" in card
    assert str(folder) not in card


def test_tokenizer_source_is_the_choice_of_a_vocabulary(folder, tmp_path) -> None:
    write_tensors_of(
        tune(make_llama(layers=4, vocabulary=38), 4), tmp_path / "long", [f"t{n}" for n in range(38)]
    )
    text = f"merge_method: task_arithmetic\nbase_model: {folder}/base\n"
    text += f"models: [{{model: {tmp_path}/long, parameters: {{weight: 1}}}}]\n"
    with pytest.raises(InputError, match="vocabularies differ"):
        run(text, tmp_path / "out")
    for source, rows in (("base", 36), ("union", 38), (f"{tmp_path}/long", 38)):
        asked = f"tokenizer_source: {source}\nchat_template: '{{{{ messages }}}}'\n"
        out = run(text + asked, tmp_path / "out")
        assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
        assert opened(out).specs["lm_head.weight"].shape[0] == rows


@pytest.fixture(scope="module")
def chats(three_models) -> None:
    """Models whose tokenizers add special tokens to those of `base`."""
    from transformers import PreTrainedTokenizerFast

    for seed, (name, tokens) in enumerate(CHATS.items(), 5):
        tune(make_llama(layers=4, vocabulary=36 + len(tokens)), seed).save_pretrained(three_models / name)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(three_models / "base")
        tokenizer.add_tokens(list(tokens), special_tokens=True)
        tokenizer.save_pretrained(three_models / name)


def test_a_union_of_two_chat_models_has_a_tokenizer_that_knows_the_tokens_of_both(chats, tmp_path) -> None:
    from transformers import AutoTokenizer

    out = run(TOKENIZERS["two prompt formats"] + "  pad_to_multiple_of: 8\n", tmp_path / "out")
    tokenizer, merged = AutoTokenizer.from_pretrained(out), opened(out)
    every = ["<|im_start|>", "t5", "<|im_end|>", "<|special|>", "<|start_header_id|>", "t7", "<|eot_id|>"]
    assert tokenizer.tokenize("<|im_start|>t5<|im_end|><|special|> <|start_header_id|>t7 <|eot_id|>") == every
    assert tokenizer.decode(tokenizer(" ".join(every))["input_ids"], skip_special_tokens=True) == "t5 t7"
    assert len(tokenizer) == 42
    config = json.loads((out / "config.json").read_text())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert merged[name].shape[0] == config["vocab_size"] == 48
        chatml, llama3 = opened("chatml_model")[name], opened("llama3_model")[name]
        rows = tokenizer.convert_tokens_to_ids(["<|special|>", "<|im_end|>", "<|eot_id|>"])
        wanted = torch.stack([(0.3 * chatml[38] + llama3[39]) / 1.3, chatml[37], llama3[38]])
        torch.testing.assert_close(merged[name][rows], wanted)


@run_mergekit
@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokens_get_mergekits_rows(case: str, chats, tmp_path) -> None:
    ours = run(TOKENIZERS[case], tmp_path / "ours")
    merge_by_mergekit(TOKENIZERS[case], tmp_path / "theirs")
    rows, theirs = [], []
    for out in (ours, tmp_path / "theirs"):
        tokens, tensors = read_tokens(out), dict(opened(out))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            order = [tokens[token] for token in sorted(tokens)]
            padding = sorted(set(range(len(tensors[name]))) - set(order))
            tensors[name] = tensors[name][order + padding]
        rows.append(sorted(tokens))
        theirs.append(tensors)
    assert rows[0] == rows[1]
    assert_same(*theirs)
    added = [
        json.loads((out / "tokenizer.json").read_text())["added_tokens"] for out in (ours, tmp_path / "theirs")
    ]
    settings = [{t["content"]: {k: v for k, v in t.items() if k != "id"} for t in a} for a in added]
    assert settings[0] == settings[1]


def run_layers(layers, hidden: torch.Tensor, model) -> torch.Tensor:
    """What a Llama's decoder makes of embeddings through these layers."""
    positions = torch.arange(hidden.shape[1])[None]
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in layers:
        hidden = layer(hidden, position_ids=positions, position_embeddings=rotary, attention_mask=None)
    return hidden


def test_stacked_layers_load_in_transformers_and_compute_what_they_compute_in_that_order(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    models = {name: AutoModelForCausalLM.from_pretrained(name).eval() for name in "abc"}
    text = EXACT["layers of three models, interleaved, one twice"]
    for name in "abc":
        text = text.replace(f"model: {name},", f"model: {Path(name).absolute()},")
    merged = AutoModelForCausalLM.from_pretrained(run(text, tmp_path / "out")).eval()
    assert merged.config.num_hidden_layers == 6
    order = [("a", 0), ("a", 1), ("b", 1), ("b", 2), ("b", 2), ("c", 3)]
    layers = [copy.deepcopy(models[name].model.layers[layer]) for name, layer in order]
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        layers[4].mlp.down_proj.weight.zero_()
        hidden = run_layers(layers, models["a"].model.embed_tokens(tokens), models["a"])
        torch.testing.assert_close(
            merged.model(tokens).last_hidden_state, models["c"].model.norm(hidden), rtol=1e-5, atol=1e-6
        )
    assert "a 0:2, b 1:3, b 2:3, c 3:4" in (tmp_path / "out/README.md").read_text()


def test_what_a_configuration_lists_by_layer_follows_the_layers(tmp_path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    for name in "ab":
        shutil.copytree(name, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"layer_types": kinds}))
    text = EXACT["depth up-scaling"].replace("model: a", f"model: {tmp_path}/a")
    config = json.loads((run(text, tmp_path / "out") / "config.json").read_text())
    assert config["num_hidden_layers"] == 6
    assert config["layer_types"] == kinds[:3] + kinds[1:]


def test_layers_that_differ_by_their_number_stay_what_they_are_elsewhere(tmp_path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = TEXT | {"num_hidden_layers": 4, "head_dim": 4, "sliding_window": 4, "pad_token_id": 0}
    Gemma2ForCausalLM(Gemma2Config(**sizes)).save_pretrained(tmp_path / "gemma")
    file = tmp_path / "gemma" / "config.json"
    config = json.loads(file.read_text())
    sliding, full, *_ = config.pop("layer_types")
    file.write_text(json.dumps(config))  # as the hub's Gemma 2 has it: every second layer is one that slides
    source = f"- sources: [{{model: {tmp_path}/gemma, layer_range: [%d, %d]}}]\n"
    for pieces, kinds in (([(1, 4)], [full, sliding, full]), ([(1, 2), (3, 4)], [full, full])):
        text = "merge_method: passthrough\nslices:\n" + "".join(source % piece for piece in pieces)
        assert json.loads((run(text, tmp_path / "out") / "config.json").read_text())["layer_types"] == kinds


def test_stages_are_made_by_name_and_a_dry_run_sees_their_shapes(folder, tmp_path, capsys) -> None:
    text = (
        STAGES["the result stands first"]
        .replace("model: ", f"model: {folder}/")
        .replace(f"{folder}/deep", "deep")
    )
    run(text, tmp_path / "out", "dry_run=true")
    assert "deep" not in [path.name for path in tmp_path.iterdir()]
    capsys.readouterr()
    merged = opened(run(text, tmp_path / "out"))
    b, c, a = (opened(folder / name) for name in "bca")
    for layer, (model, own) in enumerate([*((b, n) for n in range(4)), (c, 2), (c, 3), (a, 0)]):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(merged[name.format(layer)], model[name.format(own)]), layer
    assert torch.equal(merged["model.embed_tokens.weight"], b["model.embed_tokens.weight"])
    assert torch.equal(merged["lm_head.weight"], a["lm_head.weight"])
