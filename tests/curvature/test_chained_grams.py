"""RegMean++: merges with chained Grams equal the authors'."""

import pytest
import torch
from curvature.chain import Chain
from curvature.models import CASES
from golden import select_part
from torch import nn

from mergekit_lab import InputError
from mergekit_lab.curvature import chained_grams, input_grams
from mergekit_lab.merging import RegMean, RegMeanPlusPlus, merge_state_dicts

EXPERTS = ("a", "b", "c")


@pytest.fixture(scope="module")
def stored(golden):
    return golden.load_output("regmean_plusplus")


@pytest.fixture
def world(stored):
    model = Chain().double()
    model.load_state_dict(select_part(stored, "base."))
    batches = {e: [(x, None) for x in select_part(stored, f"inputs.{e}.").values()] for e in EXPERTS}
    return model, {e: select_part(stored, f"expert.{e}.") for e in EXPERTS}, batches


@pytest.mark.parametrize("ratio", [1.0, 0.95])
def test_equals_the_original_implementation(stored, world, ratio: float) -> None:
    model, experts, batches = world
    base, method = {n: v.clone() for n, v in model.state_dict().items()}, RegMeanPlusPlus(ratio=ratio)
    grams = chained_grams(model, experts, batches.__getitem__, method)
    merged = merge_state_dicts(base, experts, method, statistics={"chained_gram": grams})
    for name, value in select_part(stored, f"merged{ratio}.").items():
        torch.testing.assert_close(merged[name], value, rtol=1e-9, atol=1e-10, msg=name)
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-10, msg=name)
    plain = {}
    for expert, state in experts.items():
        model.load_state_dict(state)
        plain[expert] = input_grams(model, batches[expert])
    other = merge_state_dicts(base, experts, RegMean(ratio=ratio), grams=plain)
    assert float((other["layers.2.up.weight"] - merged["layers.2.up.weight"]).abs().max()) > 1e-3


def test_layers_are_called_as_the_model_calls_them() -> None:
    """The experts are equal, so the merge is the expert and its Grams are those of a plain pass."""
    case = CASES["Llama"]()
    state = {name: value.clone() for name, value in case.model.state_dict().items()}
    plain = input_grams(case.model, [case.batch])
    method = RegMeanPlusPlus(ratio=0.9)
    grams = chained_grams(case.model, {"a": state, "b": state}, lambda _: [case.batch], method)
    assert grams["a"].keys() == {name for name in plain if "layers." in name}
    for name, gram in grams["b"].items():
        torch.testing.assert_close(gram, plain[name], rtol=1e-3, atol=1e-5)


def test_what_cannot_be_chained_is_refused(world) -> None:
    _, experts, batches = world
    with pytest.raises(InputError, match="one stack of layers"):
        chained_grams(nn.Linear(2, 2), {}, batches.__getitem__, RegMeanPlusPlus())
    two = nn.ModuleDict({"left": Chain(), "right": Chain()})
    with pytest.raises(InputError, match=r"several \(left.layers, right.layers\)"):
        chained_grams(two, {}, batches.__getitem__, RegMeanPlusPlus())
    with pytest.raises(InputError, match="no batch was given"):
        chained_grams(Chain().double(), experts, lambda _: [], RegMeanPlusPlus())
    base = experts["a"]
    with pytest.raises(InputError, match=r"RegMeanPlusPlus.*chained_gram"):
        merge_state_dicts(base, experts, RegMeanPlusPlus())
