"""What a closure and a training loop see of the evaluations of a step, and what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import ASAM, PGN, RWP, SAGM, SAM, SWA, WASAM, MergOPT, refuse_accumulation
from optim.problems import (
    BASES,
    MOVING,
    OPTIMIZERS,
    Problem,
    assert_close,
    assert_equal_bits,
    compute_gradients,
    train,
)

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
FRACTIONS = {"sam": SAM, "asam": partial(ASAM, scaling="saft"), "wasam": partial(WASAM, steps=9)}


@every_optimizer
def test_gradients_that_are_views_of_one_buffer_give_the_same_weights(make) -> None:
    weights = []
    for views in (False, True):
        problem = Problem()
        optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])
        buffers = [torch.zeros_like(p) for p in problem.model.parameters()]

        def closure(problem=problem, buffers=buffers, views=views) -> Tensor:
            loss = problem.closure()
            if views:  # as DistributedDataParallel(gradient_as_bucket_view=True) does
                for p, buffer in zip(problem.model.parameters(), buffers, strict=True):
                    p.grad = buffer.copy_(p.grad)
            return loss

        for _ in range(3):
            optimizer.step(closure)
        weights.append(problem.copy_weights())
    assert_equal_bits(*weights)


@every_optimizer
def test_evaluations_are_numbered_and_the_base_gets_the_last_gradient_or_a_mixture(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"])
    numbers: list[int] = []
    used: list[Tensor] = []

    def closure() -> Tensor:
        loss = problem.closure()
        numbers.append(optimizer.evaluation)
        used.append(problem.model.scale.grad.clone())
        return loss

    gradients: list[Tensor] = []
    optimizer.base.register_step_pre_hook(lambda *_: gradients.append(problem.model.scale.grad.clone()))
    optimizer.step(closure)
    assert numbers == list(range(optimizer.evaluations_per_step))
    assert optimizer.evaluation == 0
    assert len(gradients) == 1
    if isinstance(optimizer, PGN | SAGM | RWP) and len(used) > 1:
        low, high = sorted(g.item() for g in used)
        assert low < gradients[0].item() < high
    else:
        assert torch.equal(gradients[0], used[-1])


@pytest.mark.parametrize("make", FRACTIONS.values(), ids=FRACTIONS.keys())
def test_a_closure_that_reads_the_fraction_ascends_on_part_of_its_batch(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"], rho=0.1, ascent_fraction=0.25)
    whole, fractions = (problem.x, problem.y), []

    def closure() -> Tensor:
        fractions.append(optimizer.batch_fraction)
        rows = round(len(whole[0]) * optimizer.batch_fraction)
        problem.x, problem.y = whole[0][:rows], whole[1][:rows]
        return problem.closure()

    start = problem.copy_weights()
    optimizer.step(closure)
    assert fractions == [0.25, 1.0]
    assert optimizer.batch_fraction == 1.0
    part, full = Problem(), Problem()
    part.x, part.y = part.x[:3], part.y[:3]
    reference = make(part.model.named_parameters(), base=BASES["sgd"], rho=0.1)
    reference.step(part.closure)
    assert_equal_bits(problem.weights_seen[1], part.weights_seen[1])
    descent = compute_gradients(full, problem.weights_seen[1])
    assert_close(problem.copy_weights(), {n: start[n] - 0.1 * g for n, g in descent.items()}, 1e-12)


@pytest.mark.parametrize("make", FRACTIONS.values(), ids=FRACTIONS.keys())
def test_a_whole_ascent_and_a_fraction_nobody_reads_are_the_same(make) -> None:
    assert_equal_bits(train(partial(make, ascent_fraction=0.1), "sgd", 3), train(make, "sgd", 3))


@pytest.mark.parametrize("make", FRACTIONS.values(), ids=FRACTIONS.keys())
def test_without_radius_the_only_evaluation_has_the_whole_batch(make) -> None:
    problem = Problem()
    optimizer = make(problem.model.named_parameters(), base=BASES["sgd"], rho=0, ascent_fraction=0.25)
    fractions = []

    def closure() -> Tensor:
        fractions.append(optimizer.batch_fraction)
        return problem.closure()

    optimizer.step(closure)
    assert fractions == [1.0]


def test_the_fraction_is_whole_again_after_a_closure_that_fails() -> None:
    problem = Problem()
    optimizer = SAM(problem.model.named_parameters(), base=BASES["sgd"], ascent_fraction=0.5)

    def closure() -> Tensor:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        optimizer.step(closure)
    assert (optimizer.batch_fraction, optimizer.evaluation) == (1.0, 0)


class Normalized(nn.Module):
    """A batch norm with a running mean, one that averages over all it has seen, and an instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 3, 1),
            nn.BatchNorm1d(3),
            nn.Tanh(),
            nn.Conv1d(3, 3, 1),
            nn.BatchNorm1d(3, momentum=None),
            nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(12, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.view(-1, 2, 4))


def compute_buffers(make: Any, attach: bool, steps: int = 2) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Buffers after `steps` steps at a learning rate of 0, and those that one forward a step leaves at θ."""
    buffers = []
    for optimize in (True, False):
        problem = Problem(torch.float32)
        torch.manual_seed(0)
        problem.model = Normalized()
        optimizer = make(problem.model.named_parameters(), base=partial(torch.optim.SGD, lr=0.0))
        if attach:
            optimizer.attach(problem.model)
        for _ in range(steps):
            optimizer.step(problem.closure) if optimize else problem.model(problem.x)
        buffers.append({name: b.clone() for name, b in problem.model.named_buffers()})
    return buffers[0], buffers[1]


TWICE = {
    name: make
    for name, make in OPTIMIZERS.items()
    if make(Problem().model.named_parameters(), base=BASES["sgd"]).evaluations_per_step > 1
}


@pytest.mark.parametrize("name", TWICE)
def test_attached_running_statistics_change_once_a_step(name) -> None:
    after, once = compute_buffers(TWICE[name], attach=True)
    counts = [int(b) for n, b in after.items() if "num_batches" in n]
    assert counts == [2, 2, 0]  # instance norms do not count
    if name != "mergopt-worst":  # whose first evaluation is not at θ
        assert_equal_bits(after, once)


def test_statistics_of_a_model_that_is_not_attached_change_in_every_evaluation() -> None:
    after, _ = compute_buffers(SAM, attach=False)
    assert after["body.1.num_batches_tracked"] == 4


def test_statistics_come_back_when_the_second_evaluation_fails() -> None:
    problem = Problem(torch.float32)
    problem.model = Normalized()
    optimizer = SAM(problem.model.named_parameters(), base=BASES["sgd"])
    optimizer.attach(problem.model)

    def closure() -> Tensor:
        loss = problem.closure()
        if optimizer.evaluation == 1:
            raise RuntimeError("out of memory")
        return loss

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    assert problem.model.body[1].num_batches_tracked == 1


@pytest.mark.parametrize("make", MOVING.values(), ids=MOVING.keys())
def test_autocast_around_the_whole_step_sees_the_moved_weights(make) -> None:
    """Autocast keeps the weights that it has cast until it ends; those are of another point."""
    inside, around = Problem(torch.float32), Problem(torch.float32)

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(inside.model(inside.x), inside.y)
        loss.backward()
        inside.losses.append(loss.item())
        return loss

    optimizer = make(inside.model.named_parameters(), base=BASES["adamw"])
    twin = make(around.model.named_parameters(), base=BASES["adamw"])
    for _ in range(3):
        optimizer.step(closure)
        with torch.autocast("cpu", torch.bfloat16):
            twin.step(around.closure)
    assert around.losses == inside.losses
    assert_equal_bits(around.copy_weights(), inside.copy_weights())


def test_modes_inside_autocast_see_the_moved_weights() -> None:
    for make in (MergOPT, RWP, partial(SWA, steps=3, start=0)):
        plain, cast = Problem(torch.float32), Problem(torch.float32)
        optimizer = make(plain.model.named_parameters(), base=BASES["adamw"])
        twin = make(cast.model.named_parameters(), base=BASES["adamw"])
        for _ in range(3):
            optimizer.train()
            with torch.autocast("cpu", torch.bfloat16):
                plain.run_closure_that_zeroes()
            optimizer.step()
        optimizer.eval()
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                cast.model(cast.x)
                twin.eval()
                shown = cast.model(cast.x)
                assert torch.equal(shown, torch.func.functional_call(cast.model, cast.copy_weights(), cast.x))
                twin.train()
                cast.run_closure_that_zeroes()
                twin.step()
            twin.eval()
        assert_equal_bits(cast.copy_weights(), plain.copy_weights())


TRAIN_MODE = ("mergopt-laplace", "mergopt-worst", "rwp", "rwp-mixed", "swa")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        *((n, r"step\(\).*GradScaler.*'bf16-mixed'.*float32") for n in TWICE if n not in TRAIN_MODE),
        *((name, "'bf16-mixed'") for name in TRAIN_MODE),
    ],
)
def test_a_gradient_scaler_with_two_evaluations_or_outside_train_mode_is_refused(name, match) -> None:
    problem = Problem(torch.float32)
    optimizer = OPTIMIZERS[name](problem.model.named_parameters(), base=BASES["sgd"])
    start = problem.copy_weights()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(problem.model(problem.x).sum()).backward()
    with pytest.raises(InputError, match=match):
        scaler.step(optimizer)
    assert_equal_bits(problem.copy_weights(), start)


@pytest.mark.parametrize("name", ["mergopt-laplace", "rwp", "swa"])
def test_a_gradient_scaler_in_train_mode_works_and_skips_what_overflowed(name) -> None:
    """A factor that is a power of two leaves float32 gradients as they are."""
    scaled, plain = Problem(torch.float32), Problem(torch.float32)
    optimizer = OPTIMIZERS[name](scaled.model.named_parameters(), base=BASES["adamw"])
    reference = OPTIMIZERS[name](plain.model.named_parameters(), base=BASES["adamw"])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer.train()
    reference.train()
    for step in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(scaled.model(scaled.x), scaled.y)
        scaler.scale(loss * (float("inf") if step == 1 else 1)).backward()
        before = scaled.copy_weights()
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert_equal_bits(scaled.copy_weights(), before)
            continue
        reference.zero_grad()
        plain.closure()
        reference.step()
    optimizer.eval()
    reference.eval()
    assert_equal_bits(scaled.copy_weights(), plain.copy_weights())


@every_optimizer
def test_accumulation_is_refused_where_only_the_last_micro_batch_would_count(make) -> None:
    optimizer = make(Problem().model.named_parameters(), base=BASES["sgd"])
    refuse_accumulation(optimizer, 1)
    if optimizer.evaluations_per_step == 1:
        refuse_accumulation(optimizer, 4)
    else:
        name = type(optimizer).__name__
        message = (
            rf"{name} evaluates its batch \d times.*the last of 4 accumulated.*accumulate_grad_batches to 1"
        )
        with pytest.raises(InputError, match=message):
            refuse_accumulation(optimizer, 4)


def test_accumulation_with_a_torch_optimizer_is_fine() -> None:
    refuse_accumulation(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 4)


@every_optimizer
def test_micro_batches_inside_the_closure_are_the_whole_batch(make) -> None:
    whole, parts = Problem(), Problem()
    optimizer = make(whole.model.named_parameters(), base=BASES["sgd"])
    optimizer.step(whole.closure)
    optimizer = make(parts.model.named_parameters(), base=BASES["sgd"])

    def closure() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for half in (slice(0, 6), slice(6, 12)):
            loss = 0.5 * nn.functional.cross_entropy(parts.model(parts.x[half]), parts.y[half])
            loss.backward()
            total += loss.detach()
        return total

    optimizer.step(closure)
    assert_close(parts.copy_weights(), whole.copy_weights(), 1e-11)


@pytest.mark.parametrize("name", ["mergopt-laplace", "rwp", "swa"])
def test_a_plain_loop_that_accumulates_keeps_one_point_for_all_micro_batches(name) -> None:
    make = OPTIMIZERS[name]
    whole, parts = Problem(), Problem()
    optimizer = make(whole.model.named_parameters(), base=BASES["sgd"])
    for _ in range(3):
        optimizer.step(whole.closure)
    optimizer = make(parts.model.named_parameters(), base=BASES["sgd"])
    optimizer.train()
    for _ in range(3):
        optimizer.zero_grad()
        points = []
        for third in (slice(0, 4), slice(4, 8), slice(8, 12)):
            points.append(parts.copy_weights())
            (nn.functional.cross_entropy(parts.model(parts.x[third]), parts.y[third]) / 3).backward()
        optimizer.step()
        for point in points[1:]:
            assert_equal_bits(point, points[0])
    optimizer.eval()
    assert_close(parts.copy_weights(), whole.copy_weights(), 1e-11)
