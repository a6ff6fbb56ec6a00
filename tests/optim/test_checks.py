"""Every mistake a user can make gets an `InputError` that names the thing, the rule and the way out."""

from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import ASAM, PGN, RWP, SAGM, SAM, SSAMD, SSAMF, SWA, WASAM, FriendlySAM, MergOPT
from mergekit_lab.optim.ascent import AscentOptimizer
from mergekit_lab.optim.averaging import Averaging
from optim.problems import BASES, OPTIMIZERS, Net, Problem, assert_equal_bits

SGD = BASES["sgd"]


class Average(Averaging):
    """One of a user's own."""

    def __init__(self, named_parameters, base, **settings) -> None:
        self.begin(**settings)
        super().__init__(named_parameters, base)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (SAM, {"rho": -0.1}, r"rho is -0\.1.*0"),
        (SAM, {"rho": 1e39}, r"rho is 1e\+39.*finite"),
        (SAM, {"rho": 10**400}, r"rho is 10{17}\.\.\.0+"),
        (MergOPT, {"coefficients": 0.5}, r"coefficients is 0\.5"),
        (MergOPT, {"coefficients": [1e308]}, r"coefficients is \[1e\+308\]"),
        (SAM, {"rho": float("nan")}, "rho is nan"),
        (SAM, {"rho": float("inf")}, "rho is inf"),
        (SAM, {"rho": "0.05"}, r"rho is '0\.05'"),
        (ASAM, {"rho": -1}, r"rho is -1; it must be"),
        (ASAM, {"eta": -1e-3}, r"eta is -0\.001.*0"),
        (ASAM, {"scaling": "samsnug"}, r"scaling is 'samsnug'.*'samsung'\?"),
        (MergOPT, {"scale": -1.0}, r"scale is -1\.0.*0"),
        (MergOPT, {"loc": float("nan")}, "loc is nan"),
        (MergOPT, {"coefficients": ()}, "give at least one"),
        (MergOPT, {"coefficients": (0.1, "x")}, r"coefficients is \[0\.1, 'x'\]"),
        (MergOPT, {"max_experts": 0}, "max_experts is 0.*1"),
        (MergOPT, {"max_experts": 2.5}, r"max_experts is 2\.5"),
        (MergOPT, {"seed": True}, "seed is True"),
        (MergOPT, {"distribution": "gausian"}, r"distribution is 'gausian'.*'gaussian'\?"),
        (MergOPT, {"scale": "fitt"}, "scale is 'fitt'"),
        (MergOPT, {"worst_of": 0}, "worst_of is 0.*1"),
        (MergOPT, {"per_rank": 1}, "per_rank is 1"),
        (SAM, {"ascent_fraction": 0}, r"ascent_fraction is 0.*\(0, 1\]"),
        (SAM, {"ascent_fraction": 1.5}, r"ascent_fraction is 1\.5.*in "),
        (ASAM, {"sync_ascent": None}, "sync_ascent is None"),
        (FriendlySAM, {"sigma": "x"}, "sigma is 'x'"),
        (FriendlySAM, {"lmbda": 1.1}, r"lmbda is 1\.1.*in "),
        (PGN, {"alpha": -0.1}, r"alpha is -0\.1"),
        (SAGM, {"alpha": -0.1}, r"alpha is -0\.1"),
        (SSAMF, {"sparsity": 1.1}, r"sparsity is 1\.1.*in "),
        (SSAMF, {"every": 0}, "every is 0.*1"),
        (SSAMD, {"steps": 0}, "steps is 0.*1"),
        (SSAMD, {"steps": 5, "drop_rate": 2}, "drop_rate is 2"),
        (SSAMD, {"steps": 5, "seed": 0.5}, r"seed is 0\.5"),
        (RWP, {"gamma": -1}, "gamma is -1"),
        (RWP, {"alpha": 1.5}, r"alpha is 1\.5"),
        (RWP, {"seed": 0.5}, r"seed is 0\.5"),
        (SWA, {"steps": 0}, "steps is 0"),
        (SWA, {"steps": 5, "start": 1.5}, r"start is 1\.5.*in "),
        (WASAM, {"steps": 5, "every": 0}, "every is 0.*1"),
        (WASAM, {"steps": 5, "rho": -1}, r"rho is -1; it must be"),
        (Average, {"steps": 5, "start": 2.0, "every": 1}, r"start is 2\.0.*in "),
        (AscentOptimizer, {"rho": 0.1, "ascent_fraction": 0}, r"ascent_fraction is 0.*\(0, 1\]"),
        (AscentOptimizer, {"rho": 0.1, "sync_ascent": "no"}, "sync_ascent is 'no'.*true or false"),
        (SAM, {"rho": numpy.float32(0.1)}, r"rho is .*a number that is at least 0"),
        (MergOPT, {"max_experts": numpy.int64(3)}, "max_experts is .*a whole number that is at least 1"),
        (MergOPT, {"scale": None}, "scale is None; known: .*a number.*fit"),
        (MergOPT, {"seed": 2**63}, r"seed is 9.*a whole number, below 2\*\*63 in size"),
        (SAM, {"ascent_fraction": None}, r"ascent_fraction is None; .*in \(0, 1\]"),
    ],
)
def test_a_hyper_parameter_out_of_range_is_named_with_its_range(make, options, message) -> None:
    with pytest.raises(InputError, match=message):
        make(Net().named_parameters(), base=SGD, **options)


def test_the_least_whole_number_of_torch_is_a_seed() -> None:
    assert MergOPT(Net().named_parameters(), base=SGD, seed=-(2**63)).seed == -(2**63)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "sam" in n or n in ("pgn", "sagm")])
def test_two_evaluation_optimizers_refuse_to_step_without_a_closure(name) -> None:
    problem = Problem()
    optimizer = OPTIMIZERS[name](problem.model.named_parameters(), base=SGD)
    problem.closure()
    start = problem.copy_weights()
    message = rf"{type(optimizer).__name__}\.step\(\) needs a closure.*GradScaler.*'16-mixed'.*'bf16-mixed'"
    with pytest.raises(InputError, match=message):
        optimizer.step()
    assert_equal_bits(problem.copy_weights(), start)


def test_samsung_asam_without_names_says_what_to_pass() -> None:
    with pytest.raises(InputError, match=r"model\.named_parameters\(\).*scaling='saft'"):
        ASAM(Net().parameters(), base=SGD)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (lambda net: net, r"Net.*model\.named_parameters\(\)"),
        (lambda net: dict(net.named_parameters()), r"model\.named_parameters\(\)"),
        (lambda net: set(net.parameters()), "must come in order"),
        (lambda net: [{"params": set(net.parameters())}], "must come in order"),
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
        (torch.optim.SGD(Net().parameters(), lr=0.1), r"SGD,.*functools\.partial"),
        (lambda params: params, r"optimizer.*functools\.partial"),
        (torch.optim.LBFGS, r"LBFGS evaluates the loss itself"),
    ],
)
def test_a_base_that_cannot_be_one_is_refused(base, message) -> None:
    with pytest.raises(InputError, match=message):
        MergOPT(Net().named_parameters(), base=base)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "message"),
    [
        (partial(ASAM, base=SGD), partial(SAM, base=SGD), "ASAM,.*SAM"),
        (partial(torch.optim.SGD, lr=0.1), partial(SAM, base=SGD), "saved by an optimizer"),
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
    with pytest.raises(InputError, match=r"MergOPT.*steps_done"):
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
    with pytest.raises(InputError, match="without names cannot join"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1
    if name != "asam-samsung":
        optimizer = OPTIMIZERS[name](Net().parameters(), base=SGD)
        with pytest.raises(InputError, match="with names cannot join"):
            optimizer.add_param_group({"params": [("w", nn.Parameter(torch.zeros(2)))]})
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2))})
        assert len(optimizer.param_groups) == 2
