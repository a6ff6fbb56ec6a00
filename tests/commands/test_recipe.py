"""mergekit recipes: what is not supported is refused by name; what is gives mergekit's own numbers.

Tests marked `beside` run in an environment that has mergekit: `make test-beside`.
"""

import copy
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints.models import make_llama, make_t5, save, tune, write_tensors_of
from commands.recipes import CHATS, EXACT, RANDOM, STAGES, TOKENIZERS
from composing import compose_config
from safetensors.torch import save_file

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import open_checkpoint as opened
from mergekit_lab.checkpoints.tokens import read_tokens
from mergekit_lab.commands.prepare import prepare
from mergekit_lab.commands.recipes import read_recipe
from mergekit_lab.commands.recipes.parameters import evaluate
from mergekit_lab.merging import merge_tensors
from mergekit_lab.programs import start


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    save(make_llama(layers=4), folder / "base")
    for seed, name in enumerate("abc", 1):
        save(tune(make_llama(layers=4), seed), folder / name)
    return folder


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)


def merge_here(text: str, seed: int = 0) -> dict[str, torch.Tensor]:
    Path("recipe.yml").write_text(text)
    recipe = read_recipe(Path("recipe.yml"), seed)
    prepared = prepare(recipe.base, recipe.experts, recipe.make_method, dtype=recipe.dtype, device="cpu")
    return dict(merge_tensors(prepared.base, prepared.experts, prepared.method, dtype=prepared.dtype))


def run(text: str, out: Path) -> Path:
    (out.parent / "r.yml").write_text(text)
    common = ["+experiment=merge_checkpoints", "device=cpu", "progress=false", "overwrite=true"]
    cfg, choices = compose_config([*common, f"recipe={out.parent}/r.yml", f"out={out}"])
    start(cfg, out.parent / "run", choices, [])
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
def test_every_recipe_runs_and_neither_order_nor_blocks_matter(case: str) -> None:
    text = {**EXACT, **RANDOM}[case]
    first, again = merge_here(text, seed=5), merge_here(text, seed=5)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], opened("base")[name]) for name in first)


@pytest.mark.parametrize(
    ("setting", "t", "name", "wanted"),
    [
        (0.3, 0.5, "x", 0.3),
        ([0, 1], 0.25, "x", 0.25),
        ([0, 1, 0], 0.75, "x", 0.5),
        ([2], 1.0, "x", 2),
        ([False, True], 1.0, "x", True),
        ([{"filter": "mlp", "value": [1, 2]}, {"value": 5}], 0.5, "layers.0.mlp.w", 1.5),
        ([{"filter": "mlp", "value": [1, 2]}, {"value": 5}], 0.5, "layers.0.attn.w", 5),
        ([{"filter": "*", "value": 3}], 0.5, "anything", 3),
        ({"filter": "mlp", "value": 3}, 0.5, "anything", None),
    ],
)
def test_gradients_and_filters(setting, t, name, wanted) -> None:
    assert evaluate(setting, name, t, "weight") == wanted


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9))
START = "merge_method: ties\nbase_model: base\n"
TWO = "models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "not a mergekit recipe"),
        ("merge_method: ties: x", "cannot be read"),
        ("models: []", "has no merge_method"),
        ("base_model: a\ngate_mode: random\nexperts: [{source_model: b}]", "mixtures of experts from dense"),
        ("genome: {models: [a, b]}", "by search=evolve"),
        ("merge_method: moe\n" + TWO, "merge_method 'moe'"),
        ("merge_method: passthrough\n" + TWO, "one model, not 2"),
        (
            "merge_method: nuslerp\nmodels: [{model: a, parameters: {weight: 1}}]",
            "nuslerp takes 2 models, not 1",
        ),
        (
            "merge_method: nearswap\nbase_model: base\nparameters: {t: -1}\nmodels: [{model: a}]",
            "t for .* is -1.0",
        ),
        ("merge_method: tie\n" + TWO, "merge_method 'tie'.*'ties'"),
        (START + TWO + "chat_template: chatml\n", "chat_template 'chatml'"),
        (START + TWO + "modules: {}\n", "modules other than default"),
        (START + "modules: {default: {models: []}, text: {models: []}}", "modules other than default"),
        (START + TWO + "modules: {default: {models: []}}", "models is given twice"),
        (START + "modules: {default: {slicez: []}}", "'slicez'.*'slices'"),
        (START + "models: [{model: a+, parameters: {weight: 1}}]", r"'a\+' has no adapter"),
        (
            START + "models: [{model: a, parameters: {weight: true}}]",
            "weight for .* is True",
        ),
        (START + "models: [{model: a, parameters: {weight: 1e308}}]", "a finite number, in float32 too"),
        (START + "parameters: {density: -1}\n" + TWO, r"density.*-1.0.*\[0, 1\]"),
        (START + "parameters: {density: [0.5, 2]}\n" + TWO, r"density.*\[0, 1\]"),
        ("merge_method: breadcrumbs\nbase_model: base\nparameters: {gamma: 5}\n" + TWO, "gamma for .* is 5.0"),
        ("merge_method: della\nbase_model: base\nparameters: {epsilon: -1}\n" + TWO, "epsilon for .* is -1.0"),
        ("merge_method: slerp\nbase_model: base\nparameters: {t: 2}\nmodels: [{model: a}]", "t for .* is 2.0"),
        (START + "parameters: {normalize: 0.5}\n" + TWO, "normalize for .* is 0.5; it must be true or false"),
        (START + TWO + "parameters: {densty: 1}\n", "did you mean 'density'"),
        (START + "models: [{model: a, weight: 1}]", "key 'weight' of a model"),
        (START + "models: [{model: a}]", "gives no weight to a"),
        (START, "either models or slices"),
        (START + TWO + "slices: []", "either models or slices"),
        ("merge_method: ties\n" + TWO, "ties needs a base_model"),
        (START + "models: [{model: base, parameters: {weight: 1}}]", "base_model"),
        ("merge_method: slerp\nbase_model: base\nmodels: [{model: a}, {model: b}]", "one other model, not 2"),
        ("merge_method: slerp\nbase_model: base\nmodels: [{model: a}]", "gives no t"),
        (START + "models: [{model: a, parameters: {weight: heavy}}]", "'heavy'; it must be a finite number"),
        (START + "models: [{model: a, parameters: {weight: [1, .nan]}}]", "must be a finite number"),
        (START + "models: [{model: a, parameters: {weight: 1%s}}]" % ("0" * 400), "must be a finite number"),
        (START + "models: [{model: [a], parameters: {weight: 1}}]", r"model reference \['a'\] is"),
        (START + "models: [{model: null, parameters: {weight: 1}}]", "model reference None has"),
        ("[" * 5000, "nested too deep"),
        (START + TWO + "name: 2001-13-45", "YAML .month"),
        (START + TWO + "name: !!bool 7", "read as YAML .'7'"),
        (f"name: {'x' * (1 << 20)}", "more than a megabyte"),
        (f"{BOMB}merge_method: *a9", "than 20000 values"),
        (START + f"models: [{'1,' * 20_000}]", "than 20000 values"),
        ("merge_method: [ties]", "merge_method"),
        ("merge_method: linear\nmodels: [{model: true, parameters: {weight: 1}}]", "True is not a path"),
        ("merge_method: linear\nmodels: [{model: ' ', parameters: {weight: 1}}]", "has no path"),
        (START + "models: 3", "models is 3"),
        (START + "slices: 3", "slices is 3"),
        (START + "slices: [{sources: 3}]", "sources is 3"),
        (START + "slices: [{sources: [{model: a, layer_range: 4}]}]", "layer_range is 4"),
        (START + "slices: [{sources: [{model: a, layer_range: [0, x]}]}]", r"\[0, 'x'\]; it must be two"),
        (
            START + "parameters: {weight: 1}\nslices: [{sources: [{model: a, layer_range: [0, 9]}]}]",
            "has 4 layers.*0 to 9",
        ),
        (
            "merge_method: ties\nparameters: {weight: 1}\n"
            "slices: [{base_model: b, sources: [{model: a, layer_range: [0, 2]}]},"
            + " {sources: [{model: a, layer_range: [2, 4]}]}]",
            "base_model",
        ),
        (
            "merge_method: linear\nparameters: {weight: 1}\n"
            "slices: [{sources: [{model: a, layer_range: [0, 2]}," + " {model: a, layer_range: [2, 4]}]}]",
            "a twice in one slice",
        ),
        (
            "merge_method: karcher\n"
            "slices: [{sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 2]}]},"
            + " {sources: [{model: b, layer_range: [2, 4]}]}]",
            "slices with different numbers",
        ),
        (START + "models: [{model: a, parameters: {weight: [{filter: [a], value: 1}]}}]", "has the filter"),
        (START + TWO + "dtype: 16\n", "dtype is '16'"),
        (
            START + "models: [{model: a, parameters: {weight: [{value: 1, filters: x}]}}]",
            "must be filter and value",
        ),
        (START + TWO + "tokenizer: {source: base, padding: 8}", "key 'padding' of the tokenizer"),
        (
            START + TWO + "tokenizer: {pad_to_multiple_of: -8}",
            "pad_to_multiple_of is -8",
        ),
        (
            START + TWO + "tokenizer: {tokens: [x]}",
            r"tokens is \['x'\]",
        ),
        (START + TWO + "tokenizer: {tokens: {x: {force: true}}}", "token 'x' needs a"),
        (START + TWO + "tokenizer: {tokens: {x: {source: {kind: mean}}}}", "the kind 'mean' of"),
        (
            START
            + TWO
            + "tokenizer: {tokens: {x: {source: {kind: model_token, model: a, token: t, token_id: 1}}}}",
            "'x'.*token_id",
        ),
        (
            START + TWO + "tokenizer: {tokens: {x: {source: c}}}",
            "of the token 'x'",
        ),
        (
            START + TWO + "tokenizer: {source: base}\ntokenizer_source: base",
            "tokenizer_source",
        ),
        (
            START + "models: [{model: {model: {path: a}, override_architecture: x}}]",
            "key 'override_architecture'",
        ),
        (
            START + "slices: [{sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [1, 4]}]}]",
            "2, 3 layers",
        ),
        (
            START + "slices: [{sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [1, 3]}]}]",
            "layer_range,.*base_model",
        ),
        (
            "merge_method: della\nbase_model: base\nmodels: [{model: a, parameters: {weight: 1, density: "
            "0.9}}]",
            r"density 0.9 ± epsilon 0.15",
        ),
        (
            "merge_method: linear\n"
            "models: [{model: a, parameters: {weight: 0.1}}, {model: b, parameters: {weight: -0.1}}]",
            r"\[0.1, -0.1\], sum to zero",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        merge_here(text)


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


def test_a_recipe_says_what_of_it_has_no_effect() -> None:
    Path("recipe.yml").write_text(
        "merge_method: model_stock\nbase_model: base\nchat_template: auto\n"
        "parameters: {normalize: true, int8_mask: true}\n"
        "models: [{model: a, parameters: {weight: 1}}, {model: b}]"
    )
    assert read_recipe(Path("recipe.yml")).notes == [
        "the recipe's normalize has no effect on model_stock",
        "the recipe's weight has no effect on model_stock",
        "the recipe's chat_template is the tokenizer's own",
    ]


def test_keys_that_mergekit_does_not_read_become_notes() -> None:
    Path("recipe.yml").write_text(
        START
        + TWO.replace("weight: 1}}, ", "weight: 1, embed_slerp: true}}, ")
        + "name: mine\nrandom_seed: 0\nwrite_readme: README.md\nnormalize: false\nint8_mask: true\n"
    )
    assert read_recipe(Path("recipe.yml")).notes == [
        "the recipe's embed_slerp has no effect on ties",
        *(
            f"the recipe's key {name} has no effect"
            for name in ("int8_mask", "name", "normalize", "random_seed", "write_readme")
        ),
    ]


def test_a_pipe_for_a_recipe_is_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "r.yaml")
    with pytest.raises(InputError, match=r"r\.yaml is a folder"):
        read_recipe(tmp_path / "r.yaml")


def test_a_recipe_whose_aliases_expand_to_gigabytes_is_refused_in_a_short_line() -> None:
    levels = "".join(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]\n" for n in range(1, 9))
    for use in (
        "models: *a8",
        "models: [{model: *a8}]",
        "parameters: {weight: *a8}\n" + TWO,
        "dtype: *a8\n" + TWO,
    ):
        text = f"a0: &a0 [x, x, x, x, x, x, x, x, x]\n{levels}"
        Path("recipe.yml").write_text(f"{START}name: [{{x: 1}}]\n" + text + use)
        with pytest.raises(InputError) as caught:
            merge_here(Path("recipe.yml").read_text())
        assert len(str(caught.value)) < 1000


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
    (tmp_path / "r.yml").write_text(text)
    cfg, choices = compose_config(
        [
            "+experiment=merge_checkpoints",
            "device=cpu",
            "progress=false",
            f"recipe={tmp_path}/r.yml",
            f"out={tmp_path}/out",
        ]
    )
    start(cfg, tmp_path / "run", choices, [])
    wanted = merge_here(EXACT["ties"])
    assert all(torch.equal(open_checkpoint(tmp_path / "out")[n], t) for n, t in wanted.items())
    card = (tmp_path / "out/README.md").read_text()
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
    common = ["+experiment=merge_checkpoints", "device=cpu", "progress=false", "overwrite=true"]

    def merge(recipe: str) -> None:
        (tmp_path / "r.yml").write_text(recipe)
        cfg, choices = compose_config([*common, f"recipe={tmp_path}/r.yml", f"out={tmp_path}/out"])
        start(cfg, tmp_path / "run", choices, [])

    with pytest.raises(InputError, match="vocabularies differ"):
        merge(text)
    for source, rows in (("base", 36), ("union", 38), (f"{tmp_path}/long", 38)):
        merge(text + f"tokenizer_source: {source}\nchat_template: '{{{{ messages }}}}'\n")
        assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
        assert open_checkpoint(tmp_path / "out").specs["lm_head.weight"].shape[0] == rows


@pytest.fixture(scope="module")
def chats(folder) -> None:
    """Models whose tokenizers add special tokens to those of `base`."""
    from transformers import PreTrainedTokenizerFast

    for seed, (name, tokens) in enumerate(CHATS.items(), 5):
        tune(make_llama(layers=4, vocabulary=36 + len(tokens)), seed).save_pretrained(folder / name)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "base")
        tokenizer.add_tokens(list(tokens), special_tokens=True)
        tokenizer.save_pretrained(folder / name)


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


def test_stages_are_made_by_name_and_a_dry_run_sees_their_shapes(folder, tmp_path, capsys) -> None:
    text = (
        STAGES["the result stands first"]
        .replace("model: ", f"model: {folder}/")
        .replace(f"{folder}/deep", "deep")
    )
    (tmp_path / "r.yml").write_text(text)
    common = ["+experiment=merge_checkpoints", "device=cpu", "progress=false", "dry_run=true"]
    cfg, choices = compose_config([*common, f"recipe={tmp_path}/r.yml", f"out={tmp_path}/out"])
    start(cfg, tmp_path / "run", choices, [])
    assert "deep" not in [path.name for path in tmp_path.iterdir()]
    capsys.readouterr()
    merged = opened(run(text, tmp_path / "out"))
    b, c, a = (opened(folder / name) for name in "bca")
    for layer, (model, own) in enumerate([*((b, n) for n in range(4)), (c, 2), (c, 3), (a, 0)]):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(merged[name.format(layer)], model[name.format(own)]), layer
    assert torch.equal(merged["model.embed_tokens.weight"], b["model.embed_tokens.weight"])
    assert torch.equal(merged["lm_head.weight"], a["lm_head.weight"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n{0}---\nname: x\n{0}", "have the name 'x'"),
        ("name: x\n{0}---\nname: y\n{0}", "one must be the"),
        ("name: x/y\n{0}---\n{0}", "'x/y' of a document"),
        (
            "name: x\n{1}[{{model: y}}]\n---\nname: y\n{1}[{{model: x}}]\n---\n{1}[{{model: x}}]",
            r"in a circle \(document 3, x, y",
        ),
        ("{0}---\nmodels: []", "document 2 of recipe=.*merge_method"),
    ],
)
def test_documents_that_do_not_fit_each_other_are_refused(text: str, message: str) -> None:
    head = "merge_method: karcher\nmodels: "
    Path("recipe.yml").write_text(text.format(f"{head}[{{model: a}}, {{model: b}}]\n", head))
    with pytest.raises(InputError, match=message):
        read_recipe(Path("recipe.yml"))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (
            "{model: a, layer_range: [0, 2]}]}, {sources: [{model: wide, layer_range: [0, 2]}",
            "do not fit those of a",
        ),
        ("{model: t5, layer_range: [0, 1]}", "several stacks of layers"),
        ("{model: a, layer_range: [0, 2]}]}, {sources: [{model: other, layer_range: [0, 2]}", "rope_theta"),
    ],
)
def test_layers_that_do_not_fit_are_refused(models: str, message: str, folder) -> None:
    if not Path("t5").exists():
        save(make_t5(), folder / "t5")
        shutil.copytree("a", "wide")
        state = {n: torch.cat([v, v]) if "up_proj" in n else v for n, v in dict(opened("a")).items()}
        save_file(state, "wide/model.safetensors", {"format": "pt"})
        shutil.copytree("a", "other")
        config = json.loads(Path("a/config.json").read_text())
        config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
        Path("other/config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        merge_here(f"merge_method: passthrough\nslices: [{{sources: [{models}]}}]")
