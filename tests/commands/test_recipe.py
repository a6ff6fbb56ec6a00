"""mergekit recipes: what is not supported is refused by name; what is gives mergekit's own numbers.

mergekit has its own dependencies. Where it is not installed beside this package, `MERGEKIT_PYTHON` names the
interpreter of an environment that has it; without either the comparison is skipped.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints.models import llama, save, tuned, write_tensors_of
from commands.recipes import EXACT, RANDOM
from composing import composed

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import open_checkpoint as opened
from mergekit_lab.commands.prepare import prepare
from mergekit_lab.commands.recipes import read_recipe
from mergekit_lab.commands.recipes.parameters import evaluate
from mergekit_lab.merging import merge_tensors
from mergekit_lab.programs import start

MERGEKIT = sys.executable if importlib.util.find_spec("mergekit") else os.environ.get("MERGEKIT_PYTHON")
needs_mergekit = pytest.mark.skipif(not MERGEKIT, reason="mergekit is not installed (see MERGEKIT_PYTHON)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("recipes")
    save(llama(layers=4), place / "base")
    for seed, name in enumerate("abc", 1):
        save(tuned(llama(layers=4), seed), place / name)
    return place


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)


def here(text: str, seed: int = 0) -> dict[str, torch.Tensor]:
    Path("recipe.yml").write_text(text)
    recipe = read_recipe(Path("recipe.yml"), seed)
    prepared = prepare(recipe.base, recipe.experts, recipe.method, dtype=recipe.dtype, device="cpu")
    return dict(merge_tensors(prepared.base, prepared.experts, prepared.method, dtype=prepared.dtype))


def mergekits(text: str, out: Path):
    Path("recipe.yml").write_text(text)
    code = "import sys; from mergekit.scripts.run_yaml import main; sys.argv[0] = 'mergekit-yaml'; main()"
    subprocess.run(
        [str(MERGEKIT), "-c", code, "recipe.yml", str(out), "--quiet", "--no-write-model-card",
         "--random-seed", "1"],
        check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return opened(out)


@needs_mergekit
@pytest.mark.slow
@pytest.mark.parametrize("case", EXACT)
def test_a_recipe_gives_mergekits_numbers(case: str, tmp_path) -> None:
    theirs, ours = mergekits(EXACT[case], tmp_path / "out"), here(EXACT[case])
    assert set(theirs) == set(ours)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=3e-7, atol=3e-7, msg=lambda m, n=name: f"{n}: {m}")


@needs_mergekit
@pytest.mark.slow
@pytest.mark.parametrize("case", RANDOM)
def test_a_random_recipe_agrees_with_mergekit_in_distribution(case: str, tmp_path) -> None:
    """One expert: as many entries stay, of the same norms, as much like the task vector."""
    base = opened("base")
    whole = torch.cat([(opened("a")[n] - base[n]).flatten() for n in base])
    lines = RANDOM[case].splitlines()
    text = "\n".join(line for line in lines if not line.startswith("models"))
    text += "\nmodels: [{model: a, parameters: {weight: 1.0, density: 0.3}}]\n"
    numbers = []
    for merged in (mergekits(text, tmp_path / "out"), here(text)):
        delta = torch.cat([(merged[n] - base[n]).flatten() for n in base])
        alike = torch.cosine_similarity(delta, whole, dim=0)
        numbers.append([float((delta != 0).float().mean()), float(delta.abs().mean()), float(alike)])
    assert numbers[1] == pytest.approx(numbers[0], rel=0.06)
    assert numbers[1][0] == pytest.approx(0.3, rel=0.05)


def test_recipes_that_need_no_whole_tensors_merge_in_blocks() -> None:
    base = opened("base")
    for case, whole in (("ties", False), ("task arithmetic", False), ("slerp", False), ("model stock", True)):
        Path("recipe.yml").write_text(EXACT[case])
        method = read_recipe(Path("recipe.yml")).method(base)
        assert method.elementwise != whole, case


@pytest.mark.parametrize("case", {**EXACT, **RANDOM})
def test_every_recipe_runs_and_neither_order_nor_blocks_matter(case: str) -> None:
    text = {**EXACT, **RANDOM}[case]
    first, again = here(text, seed=5), here(text, seed=5)
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
        ("[1, 2]", "is no mergekit recipe"),
        ("merge_method: ties: x", "cannot be read"),
        ("models: []", "has no merge_method"),
        ("merge_method: passthrough\n" + TWO, "merge_method 'passthrough' is not supported"),
        ("merge_method: tie\n" + TWO, "merge_method 'tie' is not supported; did you mean 'ties'"),
        (START + TWO + "chat_template: chatml\n", "chat_template 'chatml' is not supported"),
        (START + TWO + "modules: {}\n", "modules other than default"),
        (START + "modules: {default: {models: []}, text: {models: []}}", "modules other than default"),
        (START + TWO + "modules: {default: {models: []}}", "models stands in the module default and beside it"),
        (START + "modules: {default: {slicez: []}}", "key 'slicez' of the module default.*'slices'"),
        (START + "models: [{model: a+, parameters: {weight: 1}}]", r"'a\+' has no adapter after its \+"),
        (
            START + "models: [{model: a, parameters: {weight: true}}]",
            "weight for .* is True",
        ),
        (START + "models: [{model: a, parameters: {weight: 1e308}}]", "a finite number, in float32 too"),
        (START + "parameters: {density: 0}\n" + TWO, r"density for .* is 0.0; it must be in \(0, 1\]"),
        (START + "parameters: {density: -1}\n" + TWO, r"density for .* is -1.0; it must be in \(0, 1\]"),
        (START + "parameters: {density: [0.5, 2]}\n" + TWO, r"density for .*; it must be in \(0, 1\]"),
        ("merge_method: breadcrumbs\nbase_model: base\nparameters: {gamma: 5}\n" + TWO, "gamma for .* is 5.0"),
        ("merge_method: della\nbase_model: base\nparameters: {epsilon: -1}\n" + TWO, "epsilon for .* is -1.0"),
        ("merge_method: slerp\nbase_model: base\nparameters: {t: 2}\nmodels: [{model: a}]", "t for .* is 2.0"),
        (START + TWO + "parameters: {densty: 1}\n", "did you mean 'density'"),
        (START + "models: [{model: a, weight: 1}]", "key 'weight' of a model"),
        (START + "models: [{model: a}]", "gives no weight to a"),
        (START, "either models or slices"),
        (START + TWO + "slices: []", "either models or slices"),
        ("merge_method: ties\n" + TWO, "ties needs a base_model"),
        (START + "models: [{model: base, parameters: {weight: 1}}]", "no models besides the base_model"),
        ("merge_method: slerp\nbase_model: base\nmodels: [{model: a}, {model: b}]", "one other model, not 2"),
        ("merge_method: slerp\nbase_model: base\nmodels: [{model: a}]", "gives no t"),
        (START + "models: [{model: a, parameters: {weight: heavy}}]", "'heavy'; it must be a finite number"),
        (START + "models: [{model: a, parameters: {weight: [1, .nan]}}]", "must be a finite number"),
        (START + "models: [{model: a, parameters: {weight: 1%s}}]" % ("0" * 400), "must be a finite number"),
        (START + "models: [{model: [a], parameters: {weight: 1}}]", r"model reference \['a'\] is no path"),
        (START + "models: [{model: null, parameters: {weight: 1}}]", "model reference None has no path"),
        ("[" * 5000, "nested too deep"),
        (f"{BOMB}merge_method: *a9", "more than 200000 values once its aliases"),
        ("merge_method: [ties]", "merge_method .* is not supported"),
        ("merge_method: linear\nmodels: [{model: true, parameters: {weight: 1}}]", "True is no path"),
        ("merge_method: linear\nmodels: [{model: ' ', parameters: {weight: 1}}]", "has no path"),
        (START + "models: 3", "models is 3; it must be a list"),
        (START + "slices: 3", "slices is 3; it must be a list"),
        (START + "slices: [{sources: 3}]", "sources is 3; it must be a list"),
        (START + "slices: [{sources: [{model: a, layer_range: 4}]}]", "layer_range is 4; it must be two"),
        (START + "slices: [{sources: [{model: a, layer_range: [0, x]}]}]", r"\[0, 'x'\]; it must be two"),
        (
            START + "parameters: {weight: 1}\nslices: [{sources: [{model: a, layer_range: [0, 9]}]}]",
            "go to layer 9, and the model has 4",
        ),
        (
            START
            + "parameters: {weight: 1}\nslices: [{base_model: b, sources: [{model: a, layer_range: [0, 2]}]},"
            + " {sources: [{model: a, layer_range: [2, 4]}]}]",
            "slices with different base_model",
        ),
        (START + "models: [{model: a, parameters: {weight: [{filter: [a], value: 1}]}}]", "has the filter"),
        (START + TWO + "dtype: 16\n", "dtype is '16'"),
        (
            START + "models: [{model: a, parameters: {weight: [{value: 1, filters: x}]}}]",
            "must be filter and value",
        ),
        (START + TWO + "tokenizer: {source: base, tokens: {}}", "key 'tokens' of the tokenizer"),
        (
            START + TWO + "tokenizer: {source: base}\ntokenizer_source: base",
            "either tokenizer_source or tokenizer",
        ),
        (
            START + "models: [{model: {model: {path: a}, override_architecture: x}}]",
            "key 'override_architecture'",
        ),
        (
            START + "slices: [{sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [1, 3]}]}]",
            "different layer_range",
        ),
        (START + "slices: [{sources: [{model: a, layer_range: [1, 4]}]}]", "layers 1 to 4 after layer 0"),
        (
            START + "parameters: {weight: 1}\nslices: [{sources: [{model: a, layer_range: [0, 3]}]}]",
            "leave out layer 3",
        ),
        (
            START
            + "slices: [{sources: [{model: a, layer_range: [0, 2]}]},"
            + " {sources: [{model: b, layer_range: [2, 4]}]}]",
            "other models in the slice from layer 2",
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
        here(text)


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
    first, second = here(text), here(same)
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
            here(Path("recipe.yml").read_text())
        assert len(str(caught.value)) < 1000


def test_an_adapter_in_a_recipe_belongs_to_the_model_it_is_added_to(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        adapted = get_peft_model(
            tuned(llama(layers=4), 1), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        )
    adapted.save_pretrained(tmp_path / "lora")
    merged = here(
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
    cfg, choices = composed(
        [
            "+experiment=merge_checkpoints",
            "device=cpu",
            "progress=false",
            f"recipe={tmp_path}/r.yml",
            f"out={tmp_path}/out",
        ]
    )
    start(cfg, tmp_path / "run", choices, [])
    wanted = here(EXACT["ties"])
    assert all(torch.equal(open_checkpoint(tmp_path / "out")[n], t) for n, t in wanted.items())
    card = (tmp_path / "out/README.md").read_text()
    assert "merge_method: ties" in card
    assert "2 experts of one base, merged by mergekit's **ties**." in card
    assert "| merge_method | ties |" in card
    assert "the recipe's gamma has no effect on ties" in card
    assert str(folder) not in card


def test_tokenizer_source_is_the_choice_of_a_vocabulary(folder, tmp_path) -> None:
    write_tensors_of(tuned(llama(layers=4, vocabulary=38), 4), tmp_path / "long", [f"t{n}" for n in range(38)])
    text = f"merge_method: task_arithmetic\nbase_model: {folder}/base\n"
    text += f"models: [{{model: {tmp_path}/long, parameters: {{weight: 1}}}}]\n"
    common = ["+experiment=merge_checkpoints", "device=cpu", "progress=false", "overwrite=true"]

    def merge(recipe: str) -> None:
        (tmp_path / "r.yml").write_text(recipe)
        cfg, choices = composed([*common, f"recipe={tmp_path}/r.yml", f"out={tmp_path}/out"])
        start(cfg, tmp_path / "run", choices, [])

    with pytest.raises(InputError, match="vocabularies differ"):
        merge(text)
    for source, rows in (("base", 36), ("union", 38), (f"{tmp_path}/long", 38)):
        merge(text + f"tokenizer_source: {source}\n")
        assert open_checkpoint(tmp_path / "out").specs["lm_head.weight"].shape[0] == rows
