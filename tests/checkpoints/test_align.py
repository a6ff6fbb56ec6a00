"""Names that differ without a difference in values are made the base's; the rest is left alone."""

import pytest
import torch
from checkpoints.models import bert, llama, save, t5, tuned
from safetensors.torch import save_file

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import align

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_all_names(model, folder):
    """As programs write it that do not know about ties: every name of the state dict."""
    save(model, folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({n: t.clone() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("make", [lambda: llama(tied=True), t5, bert])
def test_ties_are_found_in_files_that_write_every_name(make, tmp_path) -> None:
    once = open_checkpoint(save(make(), tmp_path / "once"))
    twice = open_checkpoint(with_all_names(make(), tmp_path / "twice"))
    tied = twice.tied()
    assert once.tied() == {}
    assert set(twice) - set(once) == set(tied)
    assert set(tied.values()) <= set(once)


def test_an_untied_model_with_equal_values_is_not_tied(tmp_path) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    assert open_checkpoint(save(model, tmp_path / "m")).tied() == {}


def test_second_names_are_left_out_or_added_as_the_base_has_them(tmp_path) -> None:
    once = open_checkpoint(save(llama(tied=True), tmp_path / "once"))
    twice = open_checkpoint(with_all_names(tuned(llama(tied=True), 1), tmp_path / "twice"), "twice")
    said = []
    assert set(align(once, twice, say=said.append)) == set(once)
    assert said == [f"twice: {HEAD} is {EMBED}, tied as in the base"]
    longer = align(twice, once)
    assert set(longer) == set(twice)
    assert torch.equal(longer[HEAD], once[EMBED])
    assert longer.tied() == {HEAD: EMBED}


def test_an_expert_that_unties_is_refused(tmp_path) -> None:
    base = open_checkpoint(save(llama(tied=True), tmp_path / "base"))
    expert = open_checkpoint(save(tuned(llama(), 1), tmp_path / "expert"), "cars")
    with pytest.raises(
        InputError, match=r"'cars' holds different values for lm_head\.weight and model\.embed_tokens"
    ):
        align(base, expert)


@pytest.mark.parametrize("prefix", ["module.", "model.", "net.backbone."])
def test_one_prefix_before_every_name_is_left_out(prefix) -> None:
    state = {"model.w": torch.randn(3), "head.b": torch.randn(2), "head.c": torch.randn(2)}
    base = open_checkpoint(state)
    said = []
    found = align(base, open_checkpoint({prefix + n: t for n, t in state.items()}, "x"), say=said.append)
    assert set(found) == set(state)
    assert torch.equal(found["model.w"], state["model.w"])
    assert prefix in said[0]


def test_names_that_do_not_fit_are_left_alone() -> None:
    base = open_checkpoint({"a.w": torch.zeros(1), "a.v": torch.zeros(1)})
    other = open_checkpoint({"b.w": torch.zeros(1), "b.v": torch.zeros(1)})
    assert align(base, other) is other
