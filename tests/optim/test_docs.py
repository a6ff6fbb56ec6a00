"""What docs/optimizers.md shows runs, and what its table says is true."""

import copy
import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

from mergekit_lab import optim
from mergekit_lab.optim import sam
from mergekit_lab.optim.wrapper import WrappedOptimizer
from optim.problems import BASES, Problem, assert_close, assert_equal_bits

PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run(block: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(block, "docs/optimizers.md", "exec"), names)
    return names


def block_with(text: str) -> dict[str, object]:
    (block,) = [b for b in BLOCKS if text in b]
    return run(block)


def test_the_loop_with_a_closure_runs_and_its_scheduler_acts() -> None:
    names = block_with("import SAM")
    assert isinstance(names["loss"], torch.Tensor)
    assert names["optimizer"].base.param_groups[0]["lr"] == pytest.approx(0)


def test_the_loop_without_a_closure_runs_and_saves_theta() -> None:
    names = block_with("import MergOPT")
    assert names["checkpoint"]["optimizer"]["wrapper"]["steps_done"] == 4
    assert not names["optimizer"].theta.held


def test_the_new_optimizer_of_the_page_keeps_its_promises() -> None:
    cls = block_with("class BoxSAM")["BoxSAM"]
    assert issubclass(cls, WrappedOptimizer)
    problem = Problem()
    optimizer = cls(problem.model.named_parameters(), base=BASES["sgd"], rho=0.01)
    start = problem.weights()
    optimizer.step(problem.closure)
    away, back = problem.weights_seen[-1], problem.weights()
    side = {name: (away[name] - start[name]).abs() for name in start}
    assert_close(side, {name: torch.full_like(w, 0.01) for name, w in start.items()}, 1e-10)

    twin = Problem()
    twin.model.load_state_dict(problem.model.state_dict())
    resumed = cls(twin.model.named_parameters(), base=BASES["sgd"])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, o in ((twin, resumed), (problem, optimizer)):
        o.step(p.closure)
    assert_equal_bits(twin.weights(), problem.weights())
    assert not torch.equal(back["scale"], twin.weights()["scale"])


@pytest.mark.parametrize("name", optim.__all__)
def test_the_table_has_every_optimizer_with_its_cost_and_defaults(name) -> None:
    cls = getattr(optim, name)
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    _, _, evaluations, _, hyper_parameters, _, _ = (cell.strip() for cell in row.split("|"))
    assert int(evaluations) == cls.evaluations_per_step
    options = list(inspect.signature(cls).parameters.values())[2:]
    assert hyper_parameters == ", ".join(f"`{o.name}={o.default!r}`" for o in options)


def test_the_example_in_the_docstring_runs() -> None:
    failed, tried = doctest.testmod(sam)
    assert failed == 0
    assert tried > 0
