"""What the hub and a reader get from a merged model's card holds."""

import re
import shlex
from types import SimpleNamespace

import pytest
import torch
import yaml
from composing import merge_command
from language import save_tiny
from safetensors.torch import load_file, save_file

from mergekit_lab.commands.hub_card import read_header, say_command, write_recipe
from mergekit_lab.merging import TIES

CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- other\n---\n# Base\n"


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """A tiny Llama with a card of its own, and two experts, in the folder where commands run."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "base", "llama")
    (tmp_path / "base/README.md").write_text(CARD)
    for seed, name in enumerate(("cars", "svhn")):
        folder = save_tiny(tmp_path / name, "llama")
        torch.manual_seed(seed)
        weights = {n: t + torch.randn_like(t) for n, t in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize("header", ["date: 2001-13-45", "x: !!bool 7"])
def test_a_card_whose_header_is_no_yaml_says_nothing(header: str, tmp_path) -> None:
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{header}\n---\n")
    assert read_header(tmp_path) == {}


def list_blocks(card: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", card, re.DOTALL)


def test_the_header_is_the_hub_s_and_code_command_and_recipe_of_a_card_work(inputs) -> None:
    asked = ["base=base", "experts={cars: cars, svhn: svhn}", "merger=ties", "merger.preset=mergekit"]
    merge_command(inputs, *asked, "merger.density=0.5", "out=out", "metrics={accuracy: 0.75}")
    card = (inputs / "out/README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "language": ["en"],
        "tags": ["merge", "mergekit_lab"],
        "model-index": [{"name": "out", "results": [
            {"task": {"type": "text-generation"}, "dataset": {"type": "accuracy", "name": "accuracy"},
             "metrics": [{"type": "score", "value": 0.75}]},
        ]}],
    }  # fmt: skip
    assert "| accuracy | 0.75 |" in card

    loaded: dict = {}
    exec(list_blocks(card, "python")[0], loaded)
    merged = load_file(inputs / "out/model.safetensors")
    assert torch.equal(loaded["model"].state_dict()["model.norm.weight"], merged["model.norm.weight"])

    (command,) = list_blocks(card, "sh")
    words = [word for word in shlex.split(command)[3:] if not word.startswith(("out=", "+experiment="))]
    merge_command(inputs, *words, "out=again")
    again = load_file(inputs / "again/model.safetensors")
    assert all(torch.equal(again[name], merged[name]) for name in merged)

    (inputs / "merge.yml").write_text(list_blocks(card, "yaml")[0])
    merge_command(inputs, "recipe=merge.yml", "out=by_recipe")
    by_recipe = load_file(inputs / "by_recipe/model.safetensors")
    for name in merged:
        torch.testing.assert_close(by_recipe[name], merged[name])


def test_models_of_the_hub_are_related_by_merging() -> None:
    from mergekit_lab.checkpoints.card import Card

    one = {"label": "a/b", "tensors": 1, "layout_sha256": "0" * 64}
    text = Card("m", "TIES", {}, one, {"c": one}, {}, {"torch": "2"}, hub_ids=["a/b", "c/d"]).format_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["base_model"] == ["a/b", "c/d"]
    assert header["base_model_relation"] == "merge"


@pytest.mark.parametrize(("aggregator", "written"), [(None, True), ("sum", True), ("max", False)])
def test_a_recipe_is_of_what_mergekit_has(aggregator: str | None, written: bool) -> None:
    method = TIES(preset="mergekit", aggregator=aggregator)
    prepared = SimpleNamespace(
        method=method, experts={"a": 0}, sources={"a": "x/a"}, base_source="x/base",
        include=None, exclude=(), embeddings=None, dtype=None,
    )  # fmt: skip
    assert bool(write_recipe(prepared)) == written


@pytest.mark.parametrize("include", ["*.w", ["*.w"]])
def test_one_pattern_is_written_as_a_list_of_it(include) -> None:
    prepared = SimpleNamespace(
        method=TIES(), sources={"a": "x/a", "b": "x/b"}, base_source="x/base", side={}, include=include,
        exclude=[], embeddings=None, dtype_name=None,
    )  # fmt: skip
    words = shlex.split(say_command(prepared, "out", "dense"))
    assert {"include=[*.w]", "experts={a: x/a,b: x/b}"} <= {*words}
