"""Fine-tuning learns, and one that was cut goes on as if it had not been."""

import gc
import traceback
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny import TinyEncoder, make_tiny_objective
from trainings import ADAMW, OPTIMIZERS, SETTINGS, Cut, cut_at, run

from mergekit_lab import InputError
from mergekit_lab.optim import SAM
from mergekit_lab.training import TrainingSettings, finetune
from mergekit_lab.training.module import FinetuneModule, compute_rate


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_cut_in_the_middle_and_resumed_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path, head, name
) -> None:
    settings = TrainingSettings(
        steps=12, batch_size=8, lr=1e-2, weight_decay=0.1, warmup_steps=2, validations=4, keep="last"
    )
    whole = run(tmp_path / "whole", head, OPTIMIZERS[name], settings)

    with pytest.raises(Cut):
        run(tmp_path / "cut", head, OPTIMIZERS[name], settings, on_metrics=cut_at(8))
    steps = []
    resumed = run(tmp_path / "cut", head, OPTIMIZERS[name], settings, on_metrics=lambda m, s: steps.append(s))
    assert min(steps) > 3
    assert whole.state.keys() == resumed.state.keys()
    for key, value in whole.state.items():
        assert torch.equal(resumed.state[key], value), key
    assert resumed.curve == whole.curve


def test_training_learns_and_keeps_the_best_on_validation(tmp_path, head) -> None:
    settings = TrainingSettings(steps=60, batch_size=16, lr=1e-2, weight_decay=0.0, validations=6)
    done = run(tmp_path, head, settings=settings)
    validated = [p for p in done.curve if "val_accuracy" in p]
    assert [p["step"] for p in validated] == [10, 20, 30, 40, 50, 60]
    assert done.val_accuracy == max(p["val_accuracy"] for p in validated) > 0.8
    assert done.curve[-1]["train_loss"] < done.curve[0]["train_loss"]
    assert done.state.keys() == TinyEncoder().state_dict().keys()


def test_joint_training_learns_every_task(tmp_path, head) -> None:
    settings = TrainingSettings(steps=60, batch_size=16, lr=1e-2, weight_decay=0.0, validations=2)
    assert run(tmp_path, head, settings=settings, tasks=("a", "b")).val_accuracy > 0.8


def test_two_evaluations_a_step_record_the_loss_at_the_weights_themselves(tmp_path, head) -> None:
    """At a learning rate of 0 the recorded losses must be those of a plain optimizer."""
    still = partial(torch.optim.SGD, lr=0.0)
    plain = run(tmp_path / "plain", head, still)
    sam = run(tmp_path / "sam", head, partial(SAM, base=still, rho=5.0))
    assert [p["train_loss"] for p in sam.curve] == [p["train_loss"] for p in plain.curve]


def test_lightning_s_own_clipping_is_refused_before_the_first_step(tmp_path, head) -> None:
    with pytest.raises(InputError, match=r"gradient_clip_val=0\.1.*set training\.clip_norm"):
        run(tmp_path, head, trainer={"gradient_clip_val": 0.1})
    assert list(tmp_path.iterdir()) == []


def test_clipping_acts_on_the_gradient_that_the_weights_follow(tmp_path, head) -> None:
    """With SGD at rate 1 a step moves the weights by the clipped norm."""
    settings = TrainingSettings(
        steps=1,
        batch_size=8,
        lr=1.0,
        weight_decay=0.0,
        warmup_steps=0,
        clip_norm=1e-3,
        validations=1,
        keep="last",
    )
    sgd = partial(torch.optim.SGD, lr=1.0)
    start = TinyEncoder().state_dict()
    for name, make in {"sgd": sgd, "sam": partial(SAM, base=sgd, rho=0.5)}.items():
        done = run(tmp_path / name, head, make, settings)
        moved = torch.cat([(done.state[k] - start[k]).flatten() for k in start]).norm()
        assert float(moved) == pytest.approx(1e-3, rel=1e-3), name


@pytest.mark.parametrize("make", [partial(ADAMW, lr=1e38), partial(SAM, base=partial(ADAMW, lr=1e38), rho=0.1)])
def test_an_optimizer_whose_settings_overflow_is_named(make, tmp_path, head) -> None:
    settings = TrainingSettings(steps=2, batch_size=8, lr=1e-2, weight_decay=0.0, validations=1)
    with pytest.raises(InputError, match=r"the optimizer of a .*float32"):
        run(tmp_path, head, make, settings)


def test_clipping_leaves_the_ascent_gradient_as_it_is(tmp_path, head) -> None:
    """Methods that are not invariant to the gradient's scale would go elsewhere."""
    base = partial(torch.optim.SGD, lr=0.1)
    norms = []

    class NormProbe(SAM):
        def compute_perturbation(self, params, grads):
            norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))
            return super().compute_perturbation(params, grads)

    settings = TrainingSettings(steps=1, batch_size=8, lr=1.0, weight_decay=0.0, clip_norm=1e-3, validations=1)
    run(tmp_path, head, partial(NormProbe, base=base, rho=0.5), settings)
    assert norms[0] > 1e-2


def test_processes_draw_their_own_dropout_and_one_alone_draws_by_seed_and_step() -> None:
    def draw(world: int, rank: int, step: int = 3) -> float:
        module = FinetuneModule(TinyEncoder(), {}, ADAMW, SETTINGS, seed=2)
        module.trainer = SimpleNamespace(world_size=world, global_rank=rank, global_step=step)
        module.on_train_batch_start({}, 0)
        return float(torch.rand(()))

    assert draw(1, 0) == draw(1, 0)
    assert len({draw(2, 0), draw(2, 1), draw(2, 0, 4), draw(2, 1, 4)}) == 4


def test_no_step_asks_for_a_trace_of_the_stack(tmp_path, head, monkeypatch) -> None:
    """`torch.manual_seed` does, for each kind of accelerator: a small model's steps would take far longer."""
    asked: list[int] = []
    original = traceback.extract_stack
    monkeypatch.setattr(traceback, "extract_stack", lambda *a, **k: (asked.append(1), original(*a, **k))[1])
    counts = []
    for steps in (4, 12):
        asked.clear()
        run(tmp_path / str(steps), head, settings=replace(SETTINGS, steps=steps))
        counts.append(len(asked))
    assert counts[0] == counts[1]


def test_a_quarter_of_the_batch_serves_the_ascent(tmp_path, head) -> None:
    seen = []

    class WatchedEncoder(TinyEncoder):
        def forward(self, images):
            seen.append(len(images)) if self.training else None
            return super().forward(images)

    settings = TrainingSettings(steps=2, batch_size=8, lr=1e-2, weight_decay=0.0, validations=1)
    sam = partial(SAM, base=ADAMW, rho=0.05, ascent_fraction=0.25)
    finetune(
        WatchedEncoder(), {"a": make_tiny_objective(head)}, sam, settings,
        seed=0, resume=tmp_path, trainer={"accelerator": "cpu", "enable_progress_bar": False},
    )  # fmt: skip
    assert seen == [2, 8, 2, 8]


def test_the_last_weights_are_those_of_the_last_step(tmp_path, head) -> None:
    settings = TrainingSettings(steps=12, batch_size=8, lr=1e-2, weight_decay=0.0, validations=4, keep="last")
    assert run(tmp_path, head, partial(torch.optim.SGD, lr=0.0), settings).step == 12


def test_training_ends_without_another_checkpoint(tmp_path, head) -> None:
    """It would be three times the model, written to be thrown away."""
    settings = TrainingSettings(steps=12, batch_size=8, lr=1e-2, weight_decay=0.1, validations=4, keep="last")
    done = run(tmp_path, head, settings=settings)
    assert done.step == 12
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 9
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt"]


@pytest.mark.parametrize("name", ["adamw", "asam", "ssamf", "wasam"])
def test_what_training_held_is_free_when_it_has_ended(tmp_path, head, name) -> None:
    """The memory of moments and of copies of the weights, though Lightning's objects are still there."""
    optimizers = []

    def make(named):
        optimizers.append(OPTIMIZERS[name](named))
        return optimizers[0]

    def list_tensors():
        return [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.shape == (16, 48)]

    model = TinyEncoder()
    before = {id(tensor) for tensor in list_tensors()}
    done = finetune(
        model, {"a": make_tiny_objective(head)}, make, replace(SETTINGS, keep="last"),
        seed=0, resume=tmp_path, trainer={"accelerator": "cpu", "enable_progress_bar": False},
    )  # fmt: skip
    own = {t.data_ptr() for t in (*model.parameters(), *done.state.values())}
    assert [t.shape for t in list_tensors() if id(t) not in before and t.data_ptr() not in own] == []
    assert model.body[1].weight.grad is None
    assert optimizers


def test_a_diverging_run_stops_with_its_step_and_learning_rate(tmp_path, head) -> None:
    with pytest.raises(InputError, match=r"step 1 of 12 \(learning.*0.005"):
        run(tmp_path, head * float("nan"))


def test_the_schedule_warms_up_linearly_and_ends_at_zero() -> None:
    factors = [compute_rate(step, 10, 4) for step in range(11)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[7] == pytest.approx(0.5)
    assert factors[10] == pytest.approx(0.0)


def test_a_linear_schedule_falls_evenly_after_its_warm_up_and_a_constant_one_stays() -> None:
    assert [compute_rate(step, 8, 2, "linear") for step in (0, 1, 2, 5, 8)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert [compute_rate(step, 8, 0, "constant") for step in (0, 4, 8)] == [1.0, 1.0, 1.0]
    with pytest.raises(InputError, match=r"schedule is 'linera'.*'linear'"):
        TrainingSettings(steps=1, batch_size=1, lr=1.0, weight_decay=0.0, schedule="linera")


@pytest.mark.parametrize(
    ("steps", "asked", "every"), [(300, 5, 60), (7, 5, 7), (2000, 5, 400), (1, 5, 1), (12, 5, 3)]
)
def test_the_last_validation_follows_the_last_step(steps: int, asked: int, every: int) -> None:
    settings = TrainingSettings(steps=steps, batch_size=1, lr=1.0, weight_decay=0.0, validations=asked)
    assert settings.validate_every == every


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"steps": 0}, "training.steps is 0.*least 1"),
        ({"lr": 1e38}, r"training.lr is 1e\+38.*1e\+30"),
        ({"lr": -1.0}, "training.lr is -1.0"),
        ({"warmup_steps": 13}, r"in \[0, training.steps = 12\]"),
        ({"clip_norm": 0.0}, "training.clip_norm is 0.0"),
        ({"label_smoothing": 1.0}, r"in \[0, 1\)"),
        ({"precision": "16-mixed"}, "fp16"),
        ({"keep": "first"}, "keep is 'first'"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes, match: str) -> None:
    with pytest.raises(InputError, match=match):
        TrainingSettings(**{"steps": 12, "batch_size": 8, "lr": 1e-2, "weight_decay": 0.1} | changes)
