"""The diagonal of the empirical Fisher information.

`v = E_x[(∂/∂θ log p(y|x; θ))²]`, per sample: the square of a batch's summed gradient would be another
quantity. True labels by default (the empirical Fisher of EpiMer and of Matena & Raffel 2022, section 3);
labels drawn from the model give the Fisher proper (Kunstner, Hennig & Balles 2019).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


def diagonal_fisher(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    sampled: bool = False,
    seed: int = 0,
    chunk: int = 16,
) -> dict[str, Tensor]:
    """Mean over samples of the squared gradient of the log-likelihood.

    Args:
        model: maps a batch of inputs `[N, …]` to logits `[N, C]`. It is put into evaluation mode for the
            duration, and its parameters are not changed.
        batches: pairs of inputs and labels `[N]` in `0 … C−1`.
        sampled: draw labels from the model's own distribution.
        seed: of that draw.
        chunk: samples whose gradients are held at a time; memory is `chunk` times the parameters.

    Returns:
        For every parameter that requires gradients, a float32 tensor of its shape, on its device.
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    rest = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad} | dict(
        model.named_buffers()
    )
    totals = {name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name, p in trained.items()}
    generator = torch.Generator().manual_seed(seed)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, (params, rest), (x[None],))
        return functional.cross_entropy(logits, y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    was_training = model.training
    model.eval()
    count = 0
    try:
        for inputs, given in batches:
            labels = _draw(model, inputs, generator) if sampled else given
            for x, y in zip(inputs.split(chunk), labels.split(chunk), strict=True):
                with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
                    per_sample = gradients(trained, x, y)
                for name, g in per_sample.items():
                    totals[name] += g.detach().float().square().sum(dim=0)
            count += len(labels)
    finally:
        model.train(was_training)
    return {name: total / max(count, 1) for name, total in totals.items()}


@torch.no_grad()
def _draw(model: nn.Module, inputs: Tensor, generator: torch.Generator) -> Tensor:
    chances = model(inputs).softmax(dim=-1).cpu()
    return torch.multinomial(chances, 1, generator=generator)[:, 0].to(inputs.device)
