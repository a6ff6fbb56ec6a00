"""u² is the square of the moment that the optimizer keeps."""

from functools import partial

import pytest
import torch
from torch import nn

from mergekit_lab import InputError
from mergekit_lab.curvature import first_moment, squared_first_moment
from mergekit_lab.optim import SAM


def step(optimizer, model: nn.Module) -> None:
    def closure():
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()


def test_it_is_the_squared_moment_of_adam_and_of_sgd() -> None:
    model = nn.Linear(3, 2)
    (model(torch.ones(2, 3)).square().sum()).backward()
    gradient = model.weight.grad.clone()
    model.zero_grad()
    adam = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.8, 0.9))
    step(adam, model)
    moments = squared_first_moment(adam, model.named_parameters())
    assert moments.keys() == {"weight", "bias"}
    torch.testing.assert_close(moments["weight"], (0.2 * gradient) ** 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    step(sgd, model)
    torch.testing.assert_close(squared_first_moment(sgd, model.named_parameters())["weight"], gradient**2)


def test_it_reads_through_the_optimizers_of_this_package() -> None:
    model = nn.Linear(3, 2)
    optimizer = SAM(model.named_parameters(), base=partial(torch.optim.Adam, lr=0.1), rho=0.05)
    step(optimizer, model)
    moments = squared_first_moment(optimizer, model.named_parameters())
    assert torch.equal(moments["bias"], optimizer.base.state[model.bias]["exp_avg"] ** 2)


def test_without_the_optimizer_it_is_what_adam_remembers_of_the_same_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batches = [(torch.randn(n, 3, dtype=torch.float64), torch.arange(n) % 2) for n in (5, 5, 2)]
    adam = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.8, 0.9))
    for x, y in batches:
        adam.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        adam.step()
    wanted = squared_first_moment(adam, model.named_parameters())
    moments = first_moment(model, batches, beta=0.8, chunk=2)
    assert moments.keys() == wanted.keys()
    for name, moment in moments.items():
        torch.testing.assert_close(moment.square(), wanted[name])


def test_where_no_gradient_comes_the_moment_is_zero_and_nothing_to_average_is_refused() -> None:
    model = nn.Linear(3, 2)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    moments = first_moment(model, [(torch.ones(2, 3), torch.tensor([0, 1]))])
    assert not moments["unused"].any()
    assert moments["weight"].any()
    with pytest.raises(InputError, match="one batch or more"):
        first_moment(model, [])
    with pytest.raises(InputError, match="beta is 1"):
        first_moment(model, [], beta=1)


def test_an_optimizer_without_a_moment_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(InputError, match="AdamW keeps no first"):
        squared_first_moment(torch.optim.AdamW(model.parameters()), model.named_parameters())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    step(plain, model)
    with pytest.raises(InputError, match="SGD keeps no first moment"):
        squared_first_moment(plain, model.named_parameters())
