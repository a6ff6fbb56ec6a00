"""What docs/optimizers.md and docs/add_optimizer.md show runs, and what its table says is true."""

import copy
import doctest
import inspect
import re
from functools import partial
from pathlib import Path

import lightning
import pytest
import torch

from mergekit_lab import optim
from mergekit_lab.optim import sam
from mergekit_lab.optim.wrapper import WrappedOptimizer
from optim.problems import BASES, Problem, assert_close, assert_equal_bits, make_required

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "optimizers.md").read_text(encoding="utf-8")
ADDING = (DOCS / "add_optimizer.md").read_text(encoding="utf-8")
CLASSES = [
    name
    for name in optim.__all__
    if isinstance(getattr(optim, name), type) and issubclass(getattr(optim, name), torch.optim.Optimizer)
]
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE + ADDING, flags=re.DOTALL)


def run(block: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(block, "docs/optimizers.md", "exec"), names)
    return names


def run_block_with(text: str) -> dict[str, object]:
    (block,) = [b for b in BLOCKS if text in b]
    return run(block)


def test_the_loop_with_a_closure_runs_and_its_scheduler_acts() -> None:
    names = run_block_with("CosineAnnealingLR")
    assert isinstance(names["loss"], torch.Tensor)
    assert names["optimizer"].base.param_groups[0]["lr"] == pytest.approx(0)


def test_the_loop_without_a_closure_runs_and_saves_theta() -> None:
    names = run_block_with("import MergOPT\n\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(8, 3)\nbatches")
    assert names["checkpoint"]["optimizer"]["wrapper"]["steps_done"] == 4
    assert not names["optimizer"].theta.held


def test_the_loop_with_an_average_saves_it_and_theta() -> None:
    names = run_block_with("import SWA")
    optimizer, model, average = names["optimizer"], names["model"], names["average"]
    assert optimizer.averaged_count == 5
    assert torch.equal(names["checkpoint"]["optimizer"]["wrapper"]["aside"][0], model.weight)
    assert not torch.equal(model.weight, average)


def test_the_fit_of_the_page_is_the_optimizer_s() -> None:
    names = run_block_with("import MergOPT, fit_offset")
    assert names["optimizer"].scale == names["fit"].scale > 0


def test_the_groups_of_the_page_have_their_own_radii() -> None:
    optimizer = run_block_with('"rho": 0.5')["optimizer"]
    assert optimizer.list_values("rho") == [0.01, 0.5]


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_says_which_settings_a_group_may_have(name) -> None:
    section = PAGE.split("parameter groups?\n")[1].split("```")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    printed = [s for settings, names in rows if f"`{name}`" in names for s in re.findall(r"`(\w+)`", settings)]
    assert printed == list(getattr(optim, name).group_settings)


def test_the_closure_of_the_page_reads_the_fraction() -> None:
    assert run_block_with("ascent_fraction=0.25")["sizes"] == [4, 16]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found")
def test_the_transformers_trainer_of_the_page_trains() -> None:
    names = run_block_with("import LlamaConfig")
    assert names["optimizer"].steps_done == 2
    assert not names["optimizer"].theta.held


def test_the_accelerate_loop_of_the_page_ends_at_theta_as_a_plain_loop_does() -> None:
    names = run_block_with("import Accelerator")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    x, y = torch.randn(32, 8), torch.randint(3, (32,))
    optimizer = optim.MergOPT(model.named_parameters(), base=partial(torch.optim.AdamW, lr=1e-2))
    for rows in torch.arange(32).chunk(4):
        closure = partial(backward, model, x[rows], y[rows])
        optimizer.step(closure)
    assert_equal_bits(names["checkpoint"], model.state_dict())


def backward(model, x, y) -> None:
    torch.nn.functional.cross_entropy(model(x), y).backward()


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")  # Lightning with torch ≥ 2.13
@pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)`")
@pytest.mark.parametrize(("make", "parts"), [(optim.SAM, 1), (optim.MergOPT, 2)])
def test_the_module_of_the_page_trains_as_a_plain_loop_with_clipping_does(make, parts) -> None:
    module = run_block_with("import LightningModule")["Module"]
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3).double()
    x, y = torch.randn(12, 8, dtype=torch.float64), torch.randint(3, (12,))
    plain = copy.deepcopy(model)
    make = partial(make, base=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    run = lightning.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_steps=3,
        accumulate_grad_batches=parts,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run.fit(module(model, make, max_norm=0.01), Pairs(x, y, parts, 3 * parts))
    optimizer = make(plain.named_parameters())

    def clip(*_) -> None:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)

    optimizer.base.register_step_pre_hook(clip)

    def closure() -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert_close(model.state_dict(), plain.state_dict(), 1e-12)


class Pairs:
    """`count` batches: `x` and `y` in `parts` parts, over and over."""

    def __init__(self, x, y, parts, count) -> None:
        self.batches = list(zip(x.chunk(parts), y.chunk(parts), strict=True)) * (count // parts)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def test_the_new_optimizer_of_the_page_keeps_its_promises() -> None:
    cls = run_block_with("class BoxSAM")["BoxSAM"]
    assert issubclass(cls, WrappedOptimizer)
    problem = Problem()
    optimizer = cls(problem.model.named_parameters(), base=BASES["sgd"], rho=0.01)
    start = problem.copy_weights()
    optimizer.step(problem.closure)
    away, back = problem.weights_seen[-1], problem.copy_weights()
    side = {name: (away[name] - start[name]).abs() for name in start}
    assert_close(side, {name: torch.full_like(w, 0.01) for name, w in start.items()}, 1e-10)

    twin = Problem()
    twin.model.load_state_dict(problem.model.state_dict())
    resumed = cls(twin.model.named_parameters(), base=BASES["sgd"])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, o in ((twin, resumed), (problem, optimizer)):
        o.step(p.closure)
    assert_equal_bits(twin.copy_weights(), problem.copy_weights())
    assert not torch.equal(back["scale"], twin.copy_weights()["scale"])


@pytest.mark.parametrize("name", CLASSES)
def test_the_table_has_every_optimizer_with_its_cost_and_defaults(name) -> None:
    cls = getattr(optim, name)
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    _, _, evaluations, _, hyper_parameters, _, _ = (cell.strip() for cell in row.split("|"))
    optimizer = cls(torch.nn.Linear(2, 2).named_parameters(), base=BASES["sgd"], **make_required(cls))
    assert int(evaluations) == optimizer.evaluations_per_step
    options = list(inspect.signature(cls).parameters.values())[2:]
    written = [o.name if o.default is o.empty else f"{o.name}={o.default!r}" for o in options]
    assert hyper_parameters == ", ".join(f"`{o}`" for o in written)


def test_the_example_in_the_docstring_runs() -> None:
    failed, tried = doctest.testmod(sam)
    assert failed == 0
    assert tried > 0
