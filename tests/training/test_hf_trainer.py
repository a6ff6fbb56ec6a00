"""The trainer of transformers with our optimizers: what it saves, how it resumes; three ways to train."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.lit import Lit, fit
from optim.problems import BASES, Problem, assert_close, assert_differ, assert_equal_bits
from safetensors.torch import load_file
from torch import Tensor, nn

from mergekit_lab.errors import InputError
from mergekit_lab.optim import RWP, SAM, SWA, MergOPT, count_gradient_evaluations, refuse_accumulation
from mergekit_lab.training import hf_trainer
from mergekit_lab.training.hf_trainer import make_trainer_callback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),  # Lightning with torch ≥ 2.13
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)`"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found"),
]
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
STEPS = 3
ONE_EVALUATION = {
    "adamw": ADAMW,
    "mergopt": partial(MergOPT, base=ADAMW, scale=0.05, coefficients=(0.3, 0.7)),
    "rwp": partial(RWP, base=ADAMW, gamma=0.05),
    "swa": partial(SWA, base=ADAMW, steps=STEPS, start=0),
}
every_optimizer = pytest.mark.parametrize("make", ONE_EVALUATION.values(), ids=ONE_EVALUATION.keys())


class WithLoss(nn.Module):
    """The network of a problem as transformers calls one."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.net = problem.model

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), y)}


def make_trainer(model: nn.Module, data: Any, optimizer: Any, folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=options.pop("batch", 12),
        max_steps=STEPS,
        max_grad_norm=0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="steps",
        save_steps=1,
        seed=0,
        train_sampling_strategy="sequential",
        **options,
    )
    still = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        optimizers=(optimizer, still),
        callbacks=[make_trainer_callback()],
    )


def list_rows(problem: Problem) -> list[dict[str, Tensor]]:
    return [{"x": x, "y": y} for x, y in zip(problem.x, problem.y, strict=True)]


def with_transformers(make: Any, folder: Path, **options: Any) -> Problem:
    problem = Problem(torch.float32)
    optimizer = make(problem.model.named_parameters())
    make_trainer(WithLoss(problem), list_rows(problem), optimizer, folder, **options).train()
    return problem


def train_plainly(make: Any, steps: int = STEPS) -> Problem:
    problem = Problem(torch.float32)
    optimizer = make(problem.model.named_parameters())
    for _ in range(steps):
        optimizer.step(problem.run_closure_that_zeroes)
    return problem


def with_lightning(make: Any) -> Problem:
    problem = Problem(torch.float32)
    fit(Lit(problem, make), STEPS)
    return problem


@pytest.fixture(scope="module", params=ONE_EVALUATION.values(), ids=ONE_EVALUATION.keys())
def trained(request, tmp_path_factory) -> tuple[Any, dict[str, Tensor], Path]:
    """An optimizer, the weights after transformers trained with it, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    return request.param, with_transformers(request.param, folder).copy_weights(), folder


def test_plain_torch_lightning_and_transformers_train_to_the_same_weights(trained) -> None:
    make, weights, _ = trained
    wanted = train_plainly(make).copy_weights()
    assert_equal_bits(with_lightning(make).copy_weights(), wanted)
    assert_equal_bits(weights, wanted)


def test_plain_torch_and_lightning_train_sam_to_the_same_weights() -> None:
    make = partial(SAM, base=ADAMW, rho=0.1)
    assert_equal_bits(with_lightning(make).copy_weights(), train_plainly(make).copy_weights())


def test_every_saved_checkpoint_has_the_weights_to_keep(trained) -> None:
    make, _, folder = trained
    for step in range(1, STEPS + 1):
        saved = load_file(folder / f"checkpoint-{step}" / "model.safetensors")
        wanted = train_plainly(make, step).copy_weights()
        assert_equal_bits({name: saved[f"net.{name}"] for name in wanted}, wanted)


def test_resumed_from_a_checkpoint_equals_uninterrupted(trained, tmp_path) -> None:
    make, _, folder = trained
    problem = Problem(torch.float32, seed=0)
    with torch.no_grad():
        for p in problem.model.parameters():
            p.zero_()
    optimizer = make(problem.model.named_parameters())
    again = make_trainer(WithLoss(problem), list_rows(problem), optimizer, tmp_path / "again")
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_equal_bits(problem.copy_weights(), train_plainly(make).copy_weights())


@every_optimizer
def test_accumulated_micro_batches_share_one_offset(make, tmp_path) -> None:
    trained = with_transformers(make, tmp_path, batch=6, gradient_accumulation_steps=2)
    assert_close(trained.copy_weights(), train_plainly(make).copy_weights(), 1e-4)


def test_the_offset_of_a_step_is_drawn_once(tmp_path, monkeypatch) -> None:
    drawn = []
    offset = MergOPT.add_offset
    monkeypatch.setattr(MergOPT, "add_offset", lambda *args: drawn.append(args[0].steps_done) or offset(*args))
    with_transformers(ONE_EVALUATION["mergopt"], tmp_path)
    assert drawn == list(range(STEPS))


def test_evaluation_sees_theta(tmp_path) -> None:
    make = ONE_EVALUATION["mergopt"]
    seen: list[dict[str, Tensor]] = []
    problem = Problem(torch.float32)

    class Watching(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            if not self.training:
                seen.append(problem.copy_weights())
            return super().forward(x, y)

    optimizer = make(problem.model.named_parameters())
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 12}
    make_trainer(
        Watching(problem), list_rows(problem), optimizer, tmp_path, prediction_loss_only=True, **options
    ).train()
    assert len(seen) == STEPS
    for step, weights in enumerate(seen, start=1):
        assert_equal_bits(weights, train_plainly(make, step).copy_weights())


def test_a_language_model_is_saved_at_theta_and_without_the_callback_it_is_not(tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    tokens = torch.randint(17, (6, 5), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    saved = {}
    for callback in (True, False):
        torch.manual_seed(0)
        model = LlamaForCausalLM(small)
        optimizer = ONE_EVALUATION["mergopt"](model.named_parameters())
        run = make_trainer(model, data, optimizer, tmp_path / str(callback), batch=6)
        if not callback:
            run.callback_handler.callbacks = [
                c for c in run.callback_handler.callbacks if type(c).__name__ != "KeptWeights"
            ]
        run.train()
        optimizer.eval()
        folder = tmp_path / str(callback) / f"checkpoint-{STEPS}"
        loaded = LlamaForCausalLM.from_pretrained(folder)
        saved[callback] = dict(loaded.named_parameters())
        theta = {name: p.detach() for name, p in model.named_parameters()}
    assert_equal_bits({name: saved[True][name].detach() for name in theta}, theta)
    assert_differ({name: saved[False][name].detach() for name in theta}, theta)


def test_two_evaluations_are_refused_before_the_first_step(tmp_path) -> None:
    problem = Problem(torch.float32)
    start = problem.copy_weights()
    optimizer = SAM(problem.model.named_parameters(), base=ADAMW)
    run = make_trainer(WithLoss(problem), list_rows(problem), optimizer, tmp_path)
    with pytest.raises(InputError, match=r"SAM evaluates 2 times.*Trainer"):
        run.train()
    assert_equal_bits(problem.copy_weights(), start)


def test_accumulation_is_refused_behind_accelerate_s_wrapper_too() -> None:
    from accelerate import Accelerator

    problem = Problem(torch.float32)
    optimizer = SAM(problem.model.named_parameters(), base=ADAMW)
    _, wrapped = Accelerator(cpu=True).prepare(problem.model, optimizer)
    assert count_gradient_evaluations(wrapped) == 2
    refuse_accumulation(wrapped, 1)
    with pytest.raises(InputError, match=r"SAM.*batch 2 times.*of 3 accumulated"):
        refuse_accumulation(wrapped, 3)


def test_importing_the_callback_imports_nothing_of_transformers() -> None:
    names = {name for name, value in vars(hf_trainer).items() if "transformers" in str(value)}
    assert not names - {"__doc__"}


def test_the_bases_of_these_tests_are_those_of_the_laws() -> None:
    assert BASES["adamw"].keywords == ADAMW.keywords
