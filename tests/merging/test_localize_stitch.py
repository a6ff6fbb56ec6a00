"""Localize-and-Stitch equals the authors' code, with masks by magnitude and with trained ones."""

import pytest
import torch
from curvature.chain import Chain
from golden import select_part
from merging.conftest import measure_error

from mergekit_lab import InputError
from mergekit_lab.curvature import first_moment
from mergekit_lab.merging import Localization, LocalizeStitch, learn_masks, merge_state_dicts

LEARN = Localization(start=81.5 / 412, epochs=6, lr=2e3, bias=3, l1=0.5)


class Pooled(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(dim=1)


@pytest.fixture(scope="module")
def stored(golden):
    return golden.load_output("localize_stitch")


def test_masks_by_magnitude_equal_the_original(stored) -> None:
    """Its 82 largest of 412 entries leave out the last one."""
    experts = [select_part(stored, f"expert.{t}.") for t in range(3)]
    merged = merge_state_dicts(select_part(stored, "base."), experts, LocalizeStitch(density=81.5 / 412))
    for name, value in select_part(stored, "dataless.merged.").items():
        assert measure_error(merged[name], value) <= 1e-12, name


def test_trained_masks_equal_the_original(stored) -> None:
    base, model = select_part(stored, "base."), Pooled().double()
    experts = {str(t): select_part(stored, f"expert.{t}.") for t in range(3)}
    masks = {}
    for t, expert in experts.items():
        batches = list(
            zip(
                select_part(stored, f"images.{t}.").values(),
                select_part(stored, f"labels.{t}.").values(),
                strict=True,
            )
        )

        def compute_gradient(state, batches=batches):
            model.load_state_dict(state)
            each = [first_moment(model, [batch], beta=0.0) for batch in batches]
            return {name: sum(g[name] for g in each) for name in each[0]}

        masks[t] = learn_masks(base, expert, compute_gradient, LEARN)
        started = select_part(stored, f"dataless.mask.{t}.")
        for name, wanted in select_part(stored, f"learned.mask.{t}.").items():
            assert torch.equal(masks[t][name].bool(), wanted), name
        assert any(not torch.equal(masks[t][name].bool(), value) for name, value in started.items())
    merged = merge_state_dicts(base, experts, LocalizeStitch(learn=LEARN), statistics={"mask": masks})
    for name, value in select_part(stored, "learned.merged.").items():
        assert measure_error(merged[name], value) <= 1e-12, name


def test_what_cannot_be_is_refused(stored) -> None:
    base, expert = select_part(stored, "base."), select_part(stored, "expert.0.")
    with pytest.raises(InputError, match="LocalizeStitch"):
        merge_state_dicts(base, [expert], LocalizeStitch(learn=LEARN))
    with pytest.raises(InputError, match=r"density is 0.*\(0, 1\]"):
        LocalizeStitch(density=0)
    with pytest.raises(InputError, match="lr is -1; it must be positive"):
        Localization(lr=-1)
    endless = {"head.bias": torch.full((4,), torch.inf)}
    with pytest.raises(InputError, match=r"head\.bias.*0.*lr"):
        learn_masks(base, expert, lambda state: endless, LEARN)
