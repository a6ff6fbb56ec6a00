"""Our optimizers under Lightning: the weights of a plain loop, whatever the trainer does around the step."""

from functools import partial

import lightning
import pytest
import torch
from torch import Tensor, nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import PGN, SAM, SWA, WASAM, MergOPT
from optim.lit import Lit, fit
from optim.problems import (
    BASES,
    OPTIMIZERS,
    Problem,
    assert_close,
    assert_differ,
    assert_equal_bits,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),  # Lightning with torch ≥ 2.13
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)`"),
]
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
ADAMW = BASES["adamw"]


@every_optimizer
def test_automatic_optimization_gives_the_weights_of_a_plain_loop(make) -> None:
    problem = Problem()
    fit(Lit(problem, partial(make, base=ADAMW)), 4, precision="64-true")
    assert_equal_bits(problem.copy_weights(), train(make, "adamw", 4))


@every_optimizer
def test_bf16_mixed_gives_the_weights_of_autocast_in_a_plain_loop(make) -> None:
    lit, plain = Problem(torch.float32), Problem(torch.float32)
    fit(Lit(lit, partial(make, base=ADAMW)), 3, precision="bf16-mixed")
    optimizer = make(plain.model.named_parameters(), base=ADAMW)

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(plain.model(plain.x), plain.y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert all(p.dtype is torch.float32 for p in lit.model.parameters())
    assert_equal_bits(lit.copy_weights(), plain.copy_weights())


@pytest.mark.parametrize("name", ["mergopt-laplace", "rwp", "swa"])
def test_accumulated_micro_batches_share_one_offset_and_are_the_whole_batch(name) -> None:
    problem = Problem()
    fit(Lit(problem, partial(OPTIMIZERS[name], base=ADAMW)), 3, parts=2, precision="64-true")
    assert_close(problem.copy_weights(), train(OPTIMIZERS[name], "adamw", 3), 1e-9)


def test_accumulation_with_two_evaluations_is_refused_before_the_first_step() -> None:
    problem = Problem()
    start = problem.copy_weights()
    with pytest.raises(InputError, match=r"SAM .*set accumulate_grad_batches to 1"):
        fit(Lit(problem, partial(SAM, base=ADAMW)), 3, parts=2, precision="64-true")
    assert problem.losses == []
    assert_equal_bits(problem.copy_weights(), start)


class Unprepared(Lit):
    """A module of somebody who knows nothing of optimizers that evaluate anew."""

    def configure_optimizers(self):
        return self.make(self.net.named_parameters())

    def on_train_batch_start(self, batch, batch_idx) -> None:
        pass


@every_optimizer
def test_accumulation_in_a_module_that_does_not_ask_is_refused_at_its_first_step(make) -> None:
    problem = Problem()
    start = problem.copy_weights()
    with pytest.raises(InputError, match="accumulate_grad_batches"):
        fit(Unprepared(problem, partial(make, base=ADAMW)), 3, parts=2, precision="64-true")
    assert_equal_bits(problem.copy_weights(), start)


@every_optimizer
def test_lightning_s_own_clipping_is_no_gradient_from_before_the_step(make) -> None:
    problem = Problem()
    module = Unprepared(problem, partial(make, base=ADAMW))
    fit(module, 3, precision="64-true", gradient_clip_val=1e6)
    assert_equal_bits(problem.copy_weights(), train(make, "adamw", 3))


@pytest.mark.parametrize("make", [SAM, PGN, MergOPT, partial(SWA, steps=9, start=0)])
def test_a_hook_on_the_base_clips_the_gradient_that_the_weights_follow(make) -> None:
    """At rate 1 a step of SGD moves the weights by the clipped norm."""
    problem = Problem()
    start = problem.copy_weights()
    sgd = partial(torch.optim.SGD, lr=1.0)
    fit(Lit(problem, partial(make, base=sgd), clip=1e-3), 1, precision="64-true")
    moved = torch.cat([(w - start[name]).flatten() for name, w in problem.copy_weights().items()]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=1e-4)


def test_a_step_of_two_evaluations_logs_one_loss() -> None:
    module = Lit(Problem(), partial(SAM, base=ADAMW))
    fit(module, 3, precision="64-true")
    assert len(module.first_losses) == 3


@pytest.mark.parametrize("parts", [1, 2])
def test_validation_and_checkpoints_see_theta_though_micro_batches_saw_the_offset(parts, tmp_path) -> None:
    problem = Problem()
    module = Lit(problem, partial(OPTIMIZERS["mergopt-laplace"], base=ADAMW))
    saver = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    fit(module, 2, parts=parts, precision="64-true", callbacks=[saver], enable_checkpointing=True)
    for step in (1, 2):
        (file,) = tmp_path.glob(f"*step={step}.ckpt")
        saved = torch.load(file, weights_only=True)["state_dict"]
        theta = train(OPTIMIZERS["mergopt-laplace"], "adamw", step)
        assert_close({n: saved[f"net.{n}"] for n in theta}, theta, 1e-9)


AVERAGED = {"swa": partial(SWA, steps=6, start=0.5), "wasam": partial(WASAM, steps=6, start=0.5)}


@pytest.mark.parametrize("make", AVERAGED.values(), ids=AVERAGED.keys())
def test_validation_sees_the_average_without_a_line_in_the_module(make) -> None:
    module = Lit(Problem(), partial(make, base=ADAMW))
    fit(module, 6, precision="64-true", validate=True)
    assert len(module.shown) == 6
    for step, shown in enumerate(module.shown, start=1):
        assert_equal_bits(shown, train(make, "adamw", step))
    assert_differ(module.shown[-1], module.shown[-2])


RESUMED = {
    **AVERAGED,
    **{n: OPTIMIZERS[n] for n in ("mergopt-laplace", "friendly-sam", "ssamf", "ssamd", "rwp")},
}


@pytest.mark.parametrize("make", RESUMED.values(), ids=RESUMED.keys())
def test_resumed_from_a_checkpoint_equals_uninterrupted_bit_for_bit(make, tmp_path) -> None:
    for cut in (2, 4):
        first = Lit(Problem(), partial(make, base=ADAMW))
        fit(first, cut, precision="64-true").save_checkpoint(tmp_path / "last.ckpt")
        saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
        kept = train(make, "adamw", cut)
        assert_equal_bits({name: saved[f"net.{name}"] for name in kept}, kept)
        problem = Problem(seed=0)
        with torch.no_grad():
            for p in problem.model.parameters():
                p.zero_()
        fit(Lit(problem, partial(make, base=ADAMW)), 6, ckpt=tmp_path / "last.ckpt", precision="64-true")
        assert_equal_bits(problem.copy_weights(), train(make, "adamw", 6))
