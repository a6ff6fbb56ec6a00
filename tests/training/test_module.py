"""Clocks, micro-batches, and every optimizer with every parametrization, in `finetune` itself."""

import math
from functools import partial

import pytest
import torch
from tiny import make_tiny_objective
from torch import nn
from trainings import OPTIMIZERS, Cut

from mergekit_lab import InputError
from mergekit_lab.backbones import AttentionLinear, Full, Linearized, LoRA
from mergekit_lab.optim import SAM, MergOPT, count_gradient_evaluations
from mergekit_lab.training import TrainingSettings, clock, finetune

QUIET = {"accelerator": "cpu", "enable_progress_bar": False}
KINDS = {
    "full": Full(),
    "linearized": Linearized(),
    "attention_linear": AttentionLinear(),
    "lora": LoRA(rank=2),
}


class Attentive(nn.Module):
    """Images `[N, 3, 4, 4]` as 16 tokens to features `[N, 8]`; no dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 8)
        self.norm = nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed((images / 255).to(self.out.weight.dtype).flatten(2).mT)
        x = self.norm(x)
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return self.out(torch.tanh(x).mean(1))


def run(folder, head, model, make_optimizer, settings, on_metrics=None, **trainer):
    return finetune(
        model,
        {"a": make_tiny_objective(head.to(next(model.parameters()).dtype), other_size=9)},
        make_optimizer,
        settings,
        seed=0,
        resume=folder,
        trainer=QUIET | trainer,
        on_metrics=on_metrics,
    )


@pytest.mark.parametrize("parametrization", KINDS)
def test_every_optimizer_trains_every_parametrization_for_two_steps(parametrization, tmp_path, head) -> None:
    settings = TrainingSettings(steps=2, batch_size=8, lr=1e-2, weight_decay=0.1, validations=1, keep="last")
    base = Attentive().state_dict()
    for name, make in OPTIMIZERS.items():
        model = KINDS[parametrization].make_trainable(Attentive(), seed=1)
        done = run(tmp_path / name, head, model, make, settings)
        model.load_state_dict(done.state)
        expert = KINDS[parametrization].fold(model)
        assert expert.keys() == base.keys()
        moved = {n for n, t in base.items() if not torch.equal(expert[n], t)}
        attention = {"attn.in_proj_weight", "attn.out_proj.weight"}
        assert moved == (attention if parametrization in ("attention_linear", "lora") else set(base)), name
        assert all(torch.isfinite(t).all() for t in expert.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_micro_batches_give_every_optimizer_the_gradients_of_the_whole_batch(name, tmp_path, head) -> None:
    """In float64: ascents, offsets, clipping and recorded losses too."""
    common = {"steps": 4, "batch_size": 12, "lr": 1e-2, "weight_decay": 0.1, "validations": 1, "keep": "last"}
    fits = {}
    for parts in (1, 5):
        settings = TrainingSettings(**common, precision="64-true", accumulate=parts, clip_norm=0.1)
        fits[parts] = run(tmp_path / str(parts), head, Attentive().double(), OPTIMIZERS[name], settings)
    for key, value in fits[1].state.items():
        torch.testing.assert_close(fits[5].state[key], value, rtol=1e-9, atol=1e-9)
    losses = [[p["train_loss"] for p in done.curve if "train_loss" in p] for done in fits.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_micro_batch_is_all_that_is_in_memory_at_a_time_and_one_offset_serves_all_of_them(
    tmp_path, head
) -> None:
    sizes, weights = [], set()

    class WatchedModel(Attentive):
        def forward(self, images):
            if self.training:
                sizes.append(len(images))
                weights.add(float(self.out.weight.detach().sum()))
            return super().forward(images)

    settings = TrainingSettings(steps=2, batch_size=8, lr=1e-2, weight_decay=0.0, validations=1, accumulate=4)
    run(
        tmp_path / "offsets",
        head,
        WatchedModel(),
        partial(MergOPT, base=OPTIMIZERS["adamw"], scale=1e-2),
        settings,
    )
    assert sizes == [2] * 8
    assert len(weights) == 2
    sizes.clear()
    run(tmp_path / "ascents", head, WatchedModel(), partial(SAM, base=OPTIMIZERS["adamw"]), settings)
    assert sizes == [2] * 16


def test_accumulation_by_lightning_is_refused_with_the_way_out(tmp_path, head) -> None:
    settings = TrainingSettings(steps=2, batch_size=8, lr=1e-2, weight_decay=0.0)
    with pytest.raises(InputError, match=r"set training\.accumulate"):
        run(tmp_path, head, Attentive(), OPTIMIZERS["adamw"], settings, accumulate_grad_batches=2)


class Seconds:
    """A clock that moves by one for every training batch, and by 100 for every validation."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(clock.time, "monotonic", lambda: self.now)


class Timed(Attentive):
    def __init__(self, seconds: Seconds) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, images):
        self.seconds.now += 1 if self.training else 100
        return super().forward(images)


SECONDS = {"budget": "seconds", "seconds": 12.0, "steps": 100, "warmup_steps": 25, "validations": 3}
COMMON = {"batch_size": 8, "lr": 1e-2, "weight_decay": 0.0, "keep": "last"}


def test_a_clock_stops_training_sets_the_rate_and_places_validations_and_does_not_count_them(
    tmp_path, head, monkeypatch
) -> None:
    seconds, rates = Seconds(monkeypatch), []

    class StepProbe(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    done = run(
        tmp_path, head, Timed(seconds), partial(StepProbe, lr=1.0), TrainingSettings(**SECONDS, **COMMON)
    )
    assert done.step == len(rates) == 12
    assert [p["step"] for p in done.curve if "val_accuracy" in p] == [4, 8, 12]
    assert rates[0] == pytest.approx(1 / 25)
    assert rates[1:4] == sorted(rates[1:4])
    assert rates[3] == 1.0
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[7] == pytest.approx(0.5 * (1 + math.cos(math.pi * (7 / 12 - 1 / 4) / (3 / 4))))


def test_a_run_under_a_clock_that_was_cut_goes_on_with_the_seconds_it_had_left(
    tmp_path, head, monkeypatch
) -> None:
    seconds, settings = Seconds(monkeypatch), TrainingSettings(**SECONDS, **COMMON)
    whole = run(tmp_path / "whole", head, Timed(seconds), OPTIMIZERS["sam"], settings)
    assert whole.step == 6

    def cut(metrics, step) -> None:
        if step == 4 and "train_loss" in metrics:
            raise Cut

    steps = []
    with pytest.raises(Cut):
        run(tmp_path / "cut", head, Timed(seconds), OPTIMIZERS["sam"], settings, on_metrics=cut)
    seconds.now += 1000
    watched = {"on_metrics": lambda m, s: steps.append(s), "enable_progress_bar": True}
    again = run(tmp_path / "cut", head, Timed(seconds), OPTIMIZERS["sam"], settings, **watched)
    assert min(steps) > 2
    assert again.step == whole.step
    assert all(torch.equal(again.state[n], t) for n, t in whole.state.items())
    finished = run(tmp_path / "cut", head, Timed(seconds), OPTIMIZERS["sam"], settings)
    assert finished.step == whole.step
    assert all(torch.equal(finished.state[n], t) for n, t in whole.state.items())


def test_what_a_step_costs_counts_every_evaluation_and_a_part_of_a_batch_as_that_part(head) -> None:
    parameters = list(Attentive().named_parameters())
    cost = {name: float(count_gradient_evaluations(make(parameters))) for name, make in OPTIMIZERS.items()}
    once = {"adamw", "sgd", "mergopt", "rwp", "swa"}
    wanted = {name: 1.0 if name in once else 2.0 for name in OPTIMIZERS}
    assert cost == wanted | {"mergopt_worst": 3.0, "sam_quarter": 1.25}
