"""The diagonal of the empirical Fisher information.

`v = E_x[(∂/∂θ log p(y|x; θ))²]`, per sample: the square of a batch's summed gradient would be another
quantity. True labels by default (the empirical Fisher of EpiMer and of Matena & Raffel 2022, section 3);
labels drawn from the model give the Fisher proper (Kunstner, Hennig & Balles 2019).

No sample's gradient of the whole model is ever held: a layer's squares are added up when backward passes it
(`recorder.py`, `tape.py`), from its inputs and the gradients at its outputs (`uses.py`).
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mergekit_lab.batches import Batch, count_samples, cut_batch, take_samples
from mergekit_lab.curvature.likelihood import compute_logits, draw_labels, log_likelihood, with_labels
from mergekit_lab.curvature.recorder import Recorder
from mergekit_lab.curvature.tape import NoRule, Tape
from mergekit_lab.errors import join_names
from mergekit_lab.optim.precision import widen_dtype
from mergekit_lab.ranges import Count, check_value

log = logging.getLogger(__name__)


def diagonal_fisher(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    causal: bool = False,
    sampled: bool = False,
    seed: int = 0,
    chunk: int = 32,
) -> dict[str, Tensor]:
    """Mean over samples of the squared gradient of the log-likelihood (`likelihood.py` says of what).

    Args:
        model: maps inputs to logits `[N, C]` or `[N, L, C]`, or to an object that has them as `logits`. It is
            put into evaluation mode for the duration, and its parameters are not changed. Samples must not
            mix, and dimension 0 must be the sample.
        batches: pairs of inputs and labels, or mappings of the model's keyword arguments with `labels` (−100:
            not an answer token); on the model's device. A seq2seq model gets its labels, and shifts them.
        causal: the logits at a token are of the next one (a decoder-only language model).
        sampled: draw labels from the model's own distribution, each token given the true ones before it.
        seed: of that draw.
        chunk: samples whose activations are held at a time.

    Returns:
        For every parameter that requires gradients, a tensor of its shape, on its device: float64 where the
        parameter is, else float32. A parameter under two names is there once, under the first.

    Raises:
        InputError: a batch without labels, logits that do not fit them, a chunk under 1.
    """
    check_value(chunk, Count, "chunk")
    estimate = _Estimate(model, causal, torch.Generator().manual_seed(seed) if sampled else None)
    count = 0
    with switch_to_evaluation(model):
        for batch in batches:
            for part in cut_batch(batch, chunk):
                estimate.add(part)
                count += count_samples(part)
    for total in estimate.totals.values():
        total /= max(count, 1)
    return estimate.totals


class _Estimate:
    """Sums of squared gradients. `taped` are the parameters that the tape follows, which others leave."""

    def __init__(self, model: nn.Module, causal: bool, draw: torch.Generator | None) -> None:
        self.model = model
        self.causal = causal
        self.draw = draw
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.taped = dict(self.trained)
        self.idle: set[str] = set()
        self.totals = {n: torch.zeros_like(p, dtype=widen_dtype(p)) for n, p in self.trained.items()}

    def add(self, batch: Batch) -> None:
        """Add every sample's square."""
        while True:
            slow = {name: p for name, p in self.trained.items() if name not in self.taped}
            with _freeze(slow.values()):
                try:
                    batch = self._add_taped(batch)
                    break
                except NoRule as missing:
                    log.warning(
                        "no fast rule for %s: its Fisher takes one backward pass per sample",
                        join_names(missing.names),
                    )
                    for name in missing.names:
                        self.taped.pop(name)
        if slow:
            self._add_one_by_one(batch, slow)

    def _add_taped(self, batch: Batch) -> Batch:
        """Add what the tape follows; returns the batch with the labels that were used."""
        tape = Tape(self.taped, self.totals, count_samples(batch))
        tape.mark((batch if isinstance(batch, Mapping) else batch[:1],))
        with torch.enable_grad(), Recorder(tape):
            logits, labels = compute_logits(self.model, batch, self.causal)
        self._look_for_hidden_uses(batch, tape.list_unused())
        if self.draw is not None:
            labels = draw_labels(logits, labels, self.draw)
            batch = with_labels(batch, labels, self.causal)
        loss = log_likelihood(logits, labels)
        if loss.requires_grad:
            loss.backward()
        tape.finish()
        return batch

    def _look_for_hidden_uses(self, batch: Batch, unused: list[str]) -> None:
        """A parameter that no watched function took (`torch.func` hides them) may matter all the same."""
        unknown = [name for name in unused if name not in self.idle]
        if not unknown:
            return
        hidden = [
            n for n, g in self._compute_gradients(take_samples(batch, 0, 1), unknown).items() if g is not None
        ]
        if hidden:
            raise NoRule(hidden)
        self.idle.update(unknown)

    def _compute_gradients(self, batch: Batch, names: Iterable[str]) -> dict[str, Tensor | None]:
        with torch.enable_grad():
            value = log_likelihood(*compute_logits(self.model, batch, self.causal))
        if not value.requires_grad:
            return dict.fromkeys(names)
        gradients = torch.autograd.grad(value, [self.trained[name] for name in names], allow_unused=True)
        return dict(zip(names, gradients, strict=True))

    def _add_one_by_one(self, batch: Batch, names: Iterable[str]) -> None:
        for at in range(count_samples(batch)):
            for name, g in self._compute_gradients(take_samples(batch, at, at + 1), names).items():
                if g is not None:
                    self.totals[name] += g.to(self.totals[name].dtype).square()


@contextmanager
def _freeze(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    held = list(parameters)
    for p in held:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in held:
            p.requires_grad_(True)


@contextmanager
def switch_to_evaluation(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
