"""Experts that have the base's names and shapes, and are another model's."""

import torch
from checkpoints.models import make_llama, save, tune

from mergekit_lab import open_checkpoint
from mergekit_lab.checkpoints.kinship import describe_kinship
from mergekit_lab.checkpoints.layers import LayerRange
from mergekit_lab.commands.prepare import prepare
from mergekit_lab.commands.prepared import Arranged
from mergekit_lab.merging import TIES, WeightAverage


def describe(base, expert, is_merged=lambda name: True) -> list[str]:
    return describe_kinship(open_checkpoint(base), {"x": open_checkpoint(expert)}, is_merged)


def test_another_model_is_far_from_the_base_and_one_that_was_tuned_is_near() -> None:
    base, other = make_llama(layers=4).state_dict(), make_llama(layers=4, seed=5).state_dict()
    assert not describe(base, tune(make_llama(layers=4), 1, 0.01).state_dict())
    (note,) = describe(base, other)
    assert "x is unlike the base in 5 of 5 matrices" in note
    assert "model.layers.2.mlp.down_proj.weight" in note
    assert not describe(base, other, lambda name: "embed" in name)


def test_a_matrix_with_its_rows_in_another_order_or_empty_is_named() -> None:
    base = make_llama(layers=4).state_dict()
    name = "model.layers.2.self_attn.q_proj.weight"
    (note,) = describe(base, {**base, name: base[name].flip(0)})
    assert f"1 of 5 matrices that were compared ({name};" in note
    (note,) = describe(base, {**base, name: torch.zeros_like(base[name])})
    assert f"x has only zeros in {name}" in note
    assert not describe({**base, name: torch.zeros_like(base[name])}, base)


def test_an_input_that_is_given_twice_is_named(tmp_path) -> None:
    base, a = save(make_llama(), tmp_path / "base"), save(tune(make_llama(), 1, 0.01), tmp_path / "a")
    notes = prepare(base, {"x": a, "y": str(a)}, TIES(), device="cpu").notes
    assert [note for note in notes if "same input" in note] == [
        "warning: x, y are the same input, a: is that meant?"
    ]
    notes = prepare(base, {"x": a, "y": base}, WeightAverage(), device="cpu").notes  # as in a soup
    assert not any("same input" in note for note in notes)


def test_layers_that_a_recipe_arranges_are_not_compared(tmp_path) -> None:
    models = {name: save(make_llama(layers=4, seed=i), tmp_path / name) for i, name in enumerate("ab")}
    arranged = Arranged((LayerRange(models["a"], 0, 2), LayerRange(models["b"], 2, 4)))
    assert any("unlike the base" in n for n in prepare(models["a"], {"b": models["b"]}, TIES()).notes)
    assert not any("unlike the base" in n for n in prepare(models["a"], {"x": arranged}, TIES()).notes)
