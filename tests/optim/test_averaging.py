"""SWA and WASAM: the average, the modes that show it, and checkpoints in either mode."""

from functools import partial

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import SAM, SWA, WASAM
from optim.problems import BASES, Problem, assert_close, assert_differ, assert_equal_bits, train

KINDS = {"swa": (SWA, None), "wasam": (WASAM, SAM)}
every_kind = pytest.mark.parametrize(("make", "step"), KINDS.values(), ids=KINDS.keys())


def compute_reference(step, steps: int, averaged: list[int], dtype: torch.dtype = torch.float64):
    """θ after each of `steps` steps of the optimizer, and torch's own average of those in `averaged`."""
    problem = Problem(dtype)
    optimizer = BASES["adamw"](problem.model.parameters())
    if step is not None:
        optimizer = step(problem.model.named_parameters(), base=BASES["adamw"])
    average = AveragedModel(problem.model, multi_avg_fn=get_swa_multi_avg_fn())
    path = []
    for done in range(1, steps + 1):
        optimizer.step(problem.run_closure_that_zeroes)
        path.append(problem.copy_weights())
        if done in averaged:
            average.update_parameters(problem.model)
    return path, {name: p.detach() for name, p in average.module.named_parameters()}


@pytest.mark.parametrize(
    ("start", "every", "averaged"),
    [(0, 1, [1, 2, 3, 4, 5, 6, 7, 8]), (0.5, 1, [4, 5, 6, 7, 8]), (0.5, 2, [4, 6, 8]), (0.3, 3, [2, 5, 8])],
)
@every_kind
def test_the_average_is_torch_s_and_the_path_is_the_optimizer_s_own(make, step, start, every, averaged) -> None:
    path, average = compute_reference(step, 8, averaged)
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"], steps=8, start=start, every=every)
    for theta in path:
        optimizer.step(problem.closure)
        optimizer.train()
        assert_equal_bits(problem.copy_weights(), theta)
        optimizer.eval()
    assert optimizer.averaged_count == len(averaged)
    mean = {name: torch.stack([path[i - 1][name] for i in averaged]).mean(0) for name in path[0]}
    assert_close(problem.copy_weights(), mean, 1e-14)
    assert_close(problem.copy_weights(), average, 1e-6)  # torch's weights of the mean are float32
    assert_differ(problem.copy_weights(), path[-1])


@every_kind
def test_before_the_average_begins_both_modes_are_theta(make, step) -> None:
    path, _ = compute_reference(step, 2, [])
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"], steps=4, start=0.75)
    for theta in path:
        optimizer.step(problem.closure)
        assert_equal_bits(problem.copy_weights(), theta)
        optimizer.train()
        assert_equal_bits(problem.copy_weights(), theta)
        optimizer.eval()


@every_kind
def test_modes_are_idempotent_and_the_block_leaves_the_mode_as_it_was(make, step) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"], steps=4, start=0)
    for _ in range(3):
        optimizer.step(problem.closure)
    average = problem.copy_weights()
    optimizer.eval()
    assert_equal_bits(problem.copy_weights(), average)
    optimizer.train()
    theta = problem.copy_weights()
    assert_differ(theta, average)
    optimizer.train()
    assert_equal_bits(problem.copy_weights(), theta)
    with optimizer.show_average():
        assert_equal_bits(problem.copy_weights(), average)
    assert_equal_bits(problem.copy_weights(), theta)
    optimizer.eval()
    with optimizer.show_average():
        assert_equal_bits(problem.copy_weights(), average)
    assert_equal_bits(problem.copy_weights(), average)


@every_kind
def test_steps_in_train_mode_stay_there_unless_told_otherwise(make, step) -> None:
    path, _ = compute_reference(step, 3, [])
    for stays in (True, False):
        problem = Problem()
        optimizer = make(problem.model.named_parameters(), base=BASES["adamw"], steps=4, start=0)
        optimizer.stays_in_train_mode = stays
        for theta in path:
            optimizer.train()
            optimizer.step(problem.run_closure_that_zeroes)
            assert optimizer.training is stays
            optimizer.train()
            assert_equal_bits(problem.copy_weights(), theta)


def test_swa_steps_without_a_closure_in_train_mode() -> None:
    problem = Problem()
    optimizer = SWA(problem.model.named_parameters(), base=BASES["adamw"], steps=4, start=0)
    with pytest.raises(InputError, match=r"SWA\.step\(\).*'bf16-mixed'"):
        optimizer.step()
    optimizer.train()
    for _ in range(4):
        optimizer.zero_grad()
        problem.closure()
        assert optimizer.step() is None
    optimizer.eval()
    assert_equal_bits(problem.copy_weights(), train(partial(SWA, steps=4, start=0), "adamw", 4))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("saved_at", [1, 3])
@every_kind
def test_saved_in_either_mode_and_resumed_equals_uninterrupted(make, step, saved_at, mode, tmp_path) -> None:
    make = partial(make, steps=6, start=0.4)
    first = Problem()
    optimizer = make(first.model.named_parameters(), base=BASES["adamw"])
    for _ in range(saved_at):
        optimizer.step(first.closure)
    getattr(optimizer, mode)()
    torch.save({"model": first.model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    loaded = torch.load(tmp_path / "last.pt", weights_only=True)
    assert bool(loaded["optimizer"]["wrapper"]["aside"]) is (mode == "eval" and saved_at == 3)

    second = Problem()
    resumed = make(second.model.named_parameters(), base=BASES["adamw"])
    for _ in range(4):
        resumed.step(second.closure)  # whatever it did before must not count
    second.model.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    assert resumed.training is (mode == "train")
    for _ in range(6 - saved_at):
        resumed.step(second.run_closure_that_zeroes)
    resumed.eval()
    assert_equal_bits(second.copy_weights(), train(make, "adamw", 6))


def test_the_average_begins_at_the_very_step_that_start_names() -> None:
    problem = Problem()
    optimizer = SWA(problem.model.named_parameters(), base=BASES["sgd"], steps=100, start=0.29)
    counts = []
    for _ in range(30):
        optimizer.step(problem.closure)
        counts.append(optimizer.averaged_count)
    assert counts[27:] == [0, 1, 2]


def test_the_average_of_low_precision_weights_is_kept_in_float32() -> None:
    path, _ = compute_reference(None, 6, [], torch.bfloat16)
    problem = Problem(torch.bfloat16)
    optimizer = SWA(problem.model.named_parameters(), base=BASES["adamw"], steps=6, start=0)
    for _ in range(6):
        optimizer.step(problem.closure)
    for name, p in problem.model.named_parameters():
        mean = torch.stack([theta[name].float() for theta in path]).mean(0)
        assert optimizer.average[p].dtype is torch.float32
        assert torch.allclose(optimizer.average[p], mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(p, optimizer.average[p].bfloat16())


@every_kind
def test_a_closure_that_fails_leaves_the_mode_s_weights(make, step) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["adamw"], steps=4, start=0)
    for _ in range(2):
        optimizer.step(problem.closure)

    def closure() -> None:
        raise RuntimeError("no data")

    for mode in (optimizer.eval, optimizer.train):
        mode()
        before = problem.copy_weights()
        with pytest.raises(RuntimeError, match="no data"):
            optimizer.step(closure)
        assert_equal_bits(problem.copy_weights(), before)
    assert optimizer.averaged_count == 2


def test_in_train_mode_swa_uses_the_gradients_of_the_loop_and_wasam_refuses_to_drop_them() -> None:
    for make, step in KINDS.values():
        problem = Problem()
        optimizer = make(problem.model.named_parameters(), base=BASES["sgd"], steps=9)
        optimizer.train()
        problem.closure()
        if step is None:
            optimizer.step(problem.closure)
            assert all(p.grad is not None for p in problem.model.parameters())
            continue
        with pytest.raises(InputError, match="inside the closure"):
            optimizer.step(problem.closure)
