"""mergekit recipes: what of one is read how, and what is not supported is refused by name."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints.models import make_t5, save
from commands.recipes import START, TWO, merge_here
from safetensors.torch import save_file

from mergekit_lab import InputError
from mergekit_lab.checkpoints import open_checkpoint as opened
from mergekit_lab.commands.recipes import read_recipe
from mergekit_lab.commands.recipes.parameters import evaluate

pytestmark = pytest.mark.usefixtures("folder")


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
