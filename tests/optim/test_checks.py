"""Every mistake a user can make gets an `InputError` that names the thing, the rule and the way out."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import ASAM, PGN, RWP, SAGM, SAM, SSAMD, SSAMF, SWA, WASAM, FriendlySAM, MergOPT
from optim.problems import BASES, OPTIMIZERS, Net, Problem, assert_equal_bits

SGD = BASES["sgd"]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (SAM, {"rho": -0.1}, r"rho is -0\.1; it must be a .* 0"),
        (SAM, {"rho": 1e39}, r"rho is 1e\+39; it must be .* to 1e\+30"),
        (SAM, {"rho": 10**400}, r"rho is 10{17}\.\.\.0+; it must be"),
        (MergOPT, {"coefficients": 0.5}, r"coefficients is 0\.5; it must be a list"),
        (MergOPT, {"coefficients": [1e308]}, r"coefficients is 1e\+308; it must be"),
        (SAM, {"rho": float("nan")}, r"rho is nan; it must be"),
        (SAM, {"rho": float("inf")}, r"rho is inf; it must be"),
        (SAM, {"rho": "0.05"}, r"rho is '0\.05'; it must be a"),
        (ASAM, {"rho": -1}, r"rho is -1; it must be"),
        (ASAM, {"eta": -1e-3}, r"eta is -0\.001; it must be a .* 0"),
        (ASAM, {"scaling": "samsnug"}, r"scaling is 'samsnug'.*did you mean 'samsung'\?"),
        (MergOPT, {"scale": -1.0}, r"scale is -1\.0; it must be a .* 0"),
        (MergOPT, {"loc": float("nan")}, r"loc is nan; it must be"),
        (MergOPT, {"coefficients": ()}, r"coefficients is empty; give at least one"),
        (MergOPT, {"coefficients": (0.1, "x")}, r"coefficients is 'x'; it must be a"),
        (MergOPT, {"max_experts": 0}, r"max_experts is 0; it must be a .* 1"),
        (MergOPT, {"max_experts": 2.5}, r"max_experts is 2\.5; it must be a whole number"),
        (MergOPT, {"seed": True}, r"seed is True; it must be a"),
        (MergOPT, {"distribution": "gausian"}, r"distribution is 'gausian'.*did you mean 'gaussian'\?"),
        (MergOPT, {"scale": "fitt"}, r"scale is 'fitt'; it must be a"),
        (MergOPT, {"worst_of": 0}, r"worst_of is 0; it must be a .* 1"),
        (MergOPT, {"per_rank": 1}, r"per_rank is 1; it must be true or false"),
        (SAM, {"ascent_fraction": 0}, r"ascent_fraction=0 leaves the ascent no samples: .*in \(0, 1\]"),
        (SAM, {"ascent_fraction": 1.5}, r"ascent_fraction is 1\.5; it must be a number from 0 to 1"),
        (ASAM, {"sync_ascent": None}, r"sync_ascent is None; it must be true or false"),
        (FriendlySAM, {"sigma": "x"}, r"sigma is 'x'; it must be a"),
        (FriendlySAM, {"lmbda": 1.1}, r"lmbda is 1\.1; it must be a number from 0 to 1"),
        (PGN, {"alpha": -0.1}, r"alpha is -0\.1; it must be"),
        (SAGM, {"alpha": -0.1}, r"alpha is -0\.1; it must be"),
        (SSAMF, {"sparsity": 1.1}, r"sparsity is 1\.1; it must be a number from 0 to 1"),
        (SSAMF, {"every": 0}, r"every is 0; it must be a .* 1"),
        (SSAMD, {"steps": 0}, r"steps is 0; it must be a .* 1"),
        (SSAMD, {"steps": 5, "drop_rate": 2}, r"drop_rate is 2; it must be"),
        (SSAMD, {"steps": 5, "seed": 0.5}, r"seed is 0\.5; it must be a whole number"),
        (RWP, {"gamma": -1}, r"gamma is -1; it must be"),
        (RWP, {"alpha": 1.5}, r"alpha is 1\.5; it must be"),
        (RWP, {"seed": 0.5}, r"seed is 0\.5; it must be a whole number"),
        (SWA, {"steps": 0}, r"steps is 0; it must be"),
        (SWA, {"steps": 5, "start": 1.5}, r"start is 1\.5; it must be a number from 0 to 1"),
        (WASAM, {"steps": 5, "every": 0}, r"every is 0; it must be a .* 1"),
        (WASAM, {"steps": 5, "rho": -1}, r"rho is -1; it must be"),
    ],
)
def test_a_hyper_parameter_out_of_range_is_named_with_its_range(make, options, message) -> None:
    with pytest.raises(InputError, match=message):
        make(Net().named_parameters(), base=SGD, **options)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "sam" in n or n in ("pgn", "sagm")])
def test_two_evaluation_optimizers_refuse_to_step_without_a_closure(name) -> None:
    problem = Problem()
    optimizer = OPTIMIZERS[name](problem.model.named_parameters(), base=SGD)
    problem.closure()
    start = problem.weights()
    message = rf"{type(optimizer).__name__}\.step\(\) needs a closure.*GradScaler.*'16-mixed'.*'bf16-mixed'"
    with pytest.raises(InputError, match=message):
        optimizer.step()
    assert_equal_bits(problem.weights(), start)


def test_samsung_asam_without_names_says_what_to_pass() -> None:
    with pytest.raises(InputError, match=r"pass model\.named_parameters\(\) .* or take scaling='saft'"):
        ASAM(Net().parameters(), base=SGD)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (lambda net: net, r"not as a Net: pass model\.named_parameters\(\)"),
        (lambda net: dict(net.named_parameters()), r"not as a dict: pass model\.named_parameters\(\)"),
        (lambda net: set(net.parameters()), r"must come in order, not as a set"),
        (lambda net: [{"params": set(net.parameters())}], r"must come in order, not as a set"),
        (lambda net: net.state_dict().keys(), r"cannot optimize a str"),
        (lambda net: [], r"no parameters to optimize"),
        (lambda net: [*net.fc1.named_parameters(), *net.fc2.parameters()], r"2 of 4 parameters have a name"),
        (lambda net: [torch.zeros(2, dtype=torch.int64)], r"not torch\.int64"),
        (lambda net: [torch.zeros(2, dtype=torch.complex64)], r"not torch\.complex64"),
    ],
)
def test_parameters_that_cannot_be_optimized_are_refused(parameters, message) -> None:
    with pytest.raises(InputError, match=message):
        SAM(parameters(Net()), base=SGD)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (torch.optim.SGD(Net().parameters(), lr=0.1), r"base is a SGD, not a callable: .*functools\.partial"),
        (lambda params: params, r"base returned a list, not a torch optimizer: .*functools\.partial"),
        (torch.optim.LBFGS, r"LBFGS evaluates the loss itself"),
    ],
)
def test_a_base_that_cannot_be_one_is_refused(base, message) -> None:
    with pytest.raises(InputError, match=message):
        MergOPT(Net().named_parameters(), base=base)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "message"),
    [
        (partial(ASAM, base=SGD), partial(SAM, base=SGD), r"saved by ASAM, not by SAM"),
        (partial(torch.optim.SGD, lr=0.1), partial(SAM, base=SGD), r"saved by an optimizer of another kind"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(saved_by, loaded_by, message) -> None:
    state = saved_by(Net().named_parameters()).state_dict()
    optimizer = loaded_by(Net().named_parameters())
    with pytest.raises(InputError, match=message):
        optimizer.load_state_dict(state)


def test_a_state_of_another_version_is_refused_before_anything_is_loaded() -> None:
    optimizer = MergOPT(Net().named_parameters(), base=SGD)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    del state["wrapper"]["steps_done"]
    with pytest.raises(InputError, match=r"MergOPT state dict .* disagree on the entries steps_done"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_state_with_an_unknown_scaling_is_refused() -> None:
    optimizer = ASAM(Net().named_parameters(), base=SGD)
    state: dict[str, Any] = optimizer.state_dict()
    state["wrapper"]["scaling"] = "huawei"
    with pytest.raises(InputError, match=r"scaling is 'huawei'; known: "):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_with_names_and_without_do_not_join(name) -> None:
    optimizer = OPTIMIZERS[name](Net().named_parameters(), base=SGD)
    with pytest.raises(InputError, match=r"without names cannot join.*pass its parameters with names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1
    if name != "asam-samsung":
        optimizer = OPTIMIZERS[name](Net().parameters(), base=SGD)
        with pytest.raises(InputError, match=r"with names cannot join.*pass its parameters without names"):
            optimizer.add_param_group({"params": [("w", nn.Parameter(torch.zeros(2)))]})
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2))})
        assert len(optimizer.param_groups) == 2
