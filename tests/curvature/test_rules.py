"""Per-layer squared gradients equal autograd's, one sample at a time, for every family and every rule."""

import logging

import pytest
import torch
from curvature.models import CASES, SAMPLES, Case, compute_dense, draw_noise
from torch import Tensor, nn
from torch.nn import functional

from mergekit_lab import InputError
from mergekit_lab.curvature import diagonal_fisher


def compare(case: Case, **options) -> None:
    wanted = compute_dense(case)
    fisher = diagonal_fisher(case.model, [case.batch], causal=case.causal, **options)
    assert fisher.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.abs().max() > 0 or name in case.unused, f"the case does not reach {name}"
        error = (fisher[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("name", list(CASES))
def test_a_familys_fisher_is_the_dense_one_without_a_pass_a_sample(name: str, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        compare(CASES[name]())
    assert not caplog.records


@pytest.mark.parametrize("name", ["open_clip ViT", "Llama, tied", "T5"])
def test_chunks_of_any_size_give_the_same(name: str) -> None:
    compare(CASES[name](), chunk=2)


def test_double_precision_is_kept() -> None:
    case = CASES["Llama, tied"]()
    case.model.double()
    fisher = diagonal_fisher(case.model, [case.batch], causal=True)
    for name, value in compute_dense(case).items():
        torch.testing.assert_close(fisher[name], value, rtol=1e-10, atol=1e-16)


def test_bfloat16_weights_have_a_float32_fisher_near_the_dense_one() -> None:
    case = CASES["Llama"]()
    wanted = compute_dense(case)
    case.model.bfloat16()
    fisher = diagonal_fisher(case.model, [case.batch], causal=True)
    name = "model.layers.0.mlp.up_proj.weight"
    assert fisher[name].dtype == torch.float32
    assert functional.cosine_similarity(fisher[name].flatten(), wanted[name].flatten(), dim=0) > 0.99


class Scored(nn.Module):
    """Any body whose output is averaged over its positions and scored by three fixed directions."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.register_buffer("head", torch.randn(width, 3))
        for p in body.parameters():
            p.data += 0.1 * torch.randn_like(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).reshape(len(x), -1, len(self.head)).mean(1) @ self.head


class Twice(nn.Module):
    """One linear layer used twice, the second time transposed, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(torch.tanh(self.layer(x)), self.layer.weight.T)


class Plain(nn.Module):
    """Parameters as formulas take them: in place, sliced, exponentiated, in an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, 6))
        self.gain = nn.Parameter(torch.zeros(8))
        self.temperature = nn.Parameter(torch.tensor(0.1))
        self.mix = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x += self.shift
        x *= 1 + self.gain[:6]
        return torch.einsum("nld,lk->nkd", x, self.mix) * self.temperature.exp()


class Cross(nn.Module):
    """Attention from a half of the positions to the others, with weights returned."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        padding = x[:, 2:, 0] > 1
        out, weights = self.attention(x[:, :2], x[:, 2:], x[:, 2:] * 2, key_padding_mask=padding)
        return out * weights.sum(-1, keepdim=True)


class Swapped(nn.Module):
    """Positions first, which no shape gives away as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.transpose(0, 1))).transpose(0, 1)


def make_sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


BODIES = {
    "convolutions": (
        make_sequence(nn.Conv2d(3, 4, 3, 2, 1), nn.GELU(), nn.Conv2d(4, 6, 2, dilation=2)), (3, 9, 9), 6
    ),
    "grouped convolution": (make_sequence(nn.Conv2d(4, 6, 3, groups=2, padding="same")), (4, 5, 5), 6),
    "tiles that leave a rest": (make_sequence(nn.Conv2d(3, 6, 4, 4)), (3, 9, 9), 6),
    "1-D convolution": (make_sequence(nn.Conv1d(3, 6, 3, padding=1)), (3, 8), 6),
    "batch norm": (make_sequence(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 1)), (4, 3, 3), 6),
    "group norm": (make_sequence(nn.GroupNorm(2, 6)), (6, 4, 4), 6),
    "layer and RMS norm": (make_sequence(nn.LayerNorm((4, 6)), nn.RMSNorm(6)), (4, 6), 6),
    "RMS norm by hand": (make_sequence(nn.RMSNorm(6), nn.Linear(6, 6)), (5, 6), 6),
    "transformer layer": (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (4, 6), 6),
    "attention across": (Cross(), (5, 6), 6),
    "attention with three projections": (Cross(kdim=6, vdim=6, bias=False), (5, 6), 6),
    "one layer used twice": (Twice(), (4, 6), 6),
    "formulas": (Plain(), (4, 6), 6),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BODIES))
def test_every_rule_is_exact(name: str, caplog) -> None:
    body, shape, width = BODIES[name]
    with caplog.at_level(logging.WARNING):
        compare(
            Case(
                Scored(body, width),
                (draw_noise(SAMPLES, *shape), torch.arange(SAMPLES) % 3),
                unused=("body.idle",),
            )
        )
    assert not caplog.records


def test_what_has_no_rule_is_differentiated_sample_by_sample_and_named(caplog) -> None:
    case = Case(
        Scored(make_sequence(nn.LayerNorm(6), Swapped()), 6),
        (draw_noise(SAMPLES, 4, 6), torch.arange(SAMPLES) % 3),
    )
    with caplog.at_level(logging.WARNING):
        compare(case)
    (message,) = [r.getMessage() for r in caplog.records]
    assert "body.1.layer.bias, body.1.layer.weight" in message
    assert all(p.grad is None and p.requires_grad for p in case.model.parameters())


class Scaled(nn.Module):
    """`addmm` by keywords and with its factors."""

    def __init__(self, **factors: float) -> None:
        super().__init__()
        self.factors = factors
        self.weight, self.bias = nn.Parameter(draw_noise(6, 6)), nn.Parameter(draw_noise(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, mat1=x, mat2=self.weight, **self.factors)


class SampleVectors(nn.Module):
    """Samples one by one, as vectors of as many entries as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SAMPLES, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) for row in x[:, :SAMPLES]])


class Repeated(nn.Module):
    """A vector given to each sample by a view, for a function that would broadcast it anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.floor = nn.Parameter(draw_noise(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.floor.expand(len(x), 6), 0.3)


@pytest.mark.parametrize("layer", [Scaled(), Scaled(beta=0.5, alpha=2.0), SampleVectors(), Repeated()])
def test_unusual_calls_are_exact(layer: nn.Module) -> None:
    torch.manual_seed(0)
    compare(Case(nn.Sequential(layer, nn.Linear(6, 3)), (draw_noise(SAMPLES, 6), torch.arange(SAMPLES) % 3)))


class Hidden(nn.Module):
    """A parameter that enters behind the function mode's back, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return torch.tanh(x @ self.weight)


def test_uses_that_no_function_shows_are_found(caplog) -> None:
    batch = (draw_noise(SAMPLES, 4, 6), torch.arange(SAMPLES) % 3)
    case = Case(Scored(make_sequence(nn.LayerNorm(6), Hidden()), 6), batch, unused=("body.1.idle",))
    with caplog.at_level(logging.WARNING):
        compare(case, chunk=2)
    assert "fast rule for body.1.weight" in caplog.text


def test_padding_rows_of_an_embedding_have_no_fisher() -> None:
    body = nn.Embedding(9, 6, padding_idx=2)
    tokens = torch.tensor([[1, 1, 2], [3, 2, 2], [4, 5, 1], [1, 2, 4], [7, 7, 7]])
    case = Case(Scored(body, 6), (tokens, torch.arange(SAMPLES) % 3))
    compare(case)
    assert not diagonal_fisher(case.model, [case.batch])["body.weight"][2].any()


def test_a_texts_likelihood_is_the_sum_over_its_answer_tokens() -> None:
    """So a token more in the answer adds to the Fisher, and a token of the prompt does not."""
    case = CASES["Llama"]()
    tokens = case.batch["input_ids"]
    bias = nn.Linear(16, 36)
    case.model.lm_head = bias
    case.model.eval()
    for answer in (1, 3):
        labels = torch.where(torch.arange(7) >= 7 - answer, tokens, -100)
        with torch.no_grad():
            logits = case.model(input_ids=tokens).logits[:, :-1]
        hot = functional.one_hot(tokens[:, 1:], 36)
        wanted = (hot - logits.softmax(-1))[:, -answer:].sum(1).square().mean(0)
        fisher = diagonal_fisher(case.model, [{"input_ids": tokens, "labels": labels}], causal=True)
        torch.testing.assert_close(fisher["lm_head.bias"], wanted, rtol=1e-4, atol=1e-7)


def test_drawn_tokens_stand_in_the_places_of_answers_alone() -> None:
    case = CASES["Llama"]()
    labels = torch.full_like(case.batch["labels"], -100)
    nothing = diagonal_fisher(case.model, [{**case.batch, "labels": labels}], causal=True, sampled=True)
    assert not any(v.any() for v in nothing.values())
    something = diagonal_fisher(case.model, [case.batch], causal=True, sampled=True)
    assert all(v.any() for v in something.values())


def test_drawn_tokens_do_not_depend_on_padding_or_on_chunks() -> None:
    case = CASES["Llama, padded"]()
    whole = diagonal_fisher(case.model, [case.batch], causal=True, sampled=True)
    longer = {
        "input_ids": functional.pad(case.batch["input_ids"], (0, 3)),
        "attention_mask": functional.pad(case.batch["attention_mask"], (0, 3)),
        "labels": functional.pad(case.batch["labels"], (0, 3), value=-100),
    }
    other = diagonal_fisher(case.model, [longer], causal=True, sampled=True, chunk=2)
    for name, value in whole.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5 * float(value.max()))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, "a batch needs labels"),
        ({"input_ids": torch.ones(2, 3).long(), "labels": torch.ones(2, 2).long()}, "logits .* for labels"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, match: str) -> None:
    with pytest.raises(InputError, match=match):
        diagonal_fisher(CASES["Llama"]().model, [batch], causal=True)


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="chunk is 0"):
        diagonal_fisher(nn.Linear(2, 2), [], chunk=0)
