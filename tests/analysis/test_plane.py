"""Moving weights, planes, barriers and cross-task linearity equal their definitions."""

import pytest
import torch
from tiny import TinyEncoder, TinyTask, make_tiny_objective
from torch import nn

from mergekit_lab import InputError
from mergekit_lab.analysis.plane import (
    Sample,
    Weights,
    cross_task_linearity,
    evaluate_line,
    evaluate_plane,
    find_blocks,
    measure_barrier,
)
from mergekit_lab.backbones import Objective

HEAD = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def make_experts(model: nn.Module, names=("a", "b", "c"), scale: float = 0.3):
    base = {n: t.clone() for n, t in model.state_dict().items()}
    models = {}
    for seed, name in enumerate(names):
        generator = torch.Generator().manual_seed(seed)
        models[name] = {n: t + scale * torch.randn(t.shape, generator=generator) for n, t in base.items()}
    return base, models


def make_tasks(names=("a", "b")) -> dict[str, Sample]:
    return {
        name: Sample(make_tiny_objective(HEAD + seed, size=31, seed=seed), "train", torch.arange(31))
        for seed, name in enumerate(names)
    }


def move(base, ends, **alphas):
    return {n: t + sum(a * (ends[e][n] - t) for e, a in alphas.items()) for n, t in base.items()}


def test_weights_go_anywhere_and_come_back_without_drift() -> None:
    model = TinyEncoder()
    base, ends = make_experts(model)
    weights = Weights(model, base, ends)
    for step in range(200):
        weights.move({"a": 0.01 * step, "b": -1.0})
    weights.move({"a": 0.4, "c": 0.7})
    for name, value in move(base, ends, a=0.4, c=0.7).items():
        torch.testing.assert_close(model.state_dict()[name], value)
    weights.move({})
    assert all(torch.equal(model.state_dict()[n], t) for n, t in base.items())


def test_a_state_that_lacks_tensors_is_named() -> None:
    model = TinyEncoder()
    base, ends = make_experts(model)
    ends["b"].pop("body.1.bias")
    with pytest.raises(InputError, match=r"lacks 1 tensors.*\(body.1.bias\)"):
        Weights(model, base, ends)


def test_scores_are_cross_entropy_and_accuracy_whatever_the_batch() -> None:
    model, task = TinyEncoder().train(), make_tasks()["b"]
    small, large = task.score(model, 4), task.score(model, 100)
    model.eval()
    images, labels = task.objective.make_batch("train", task.index)
    with torch.no_grad():
        logits = model(images) @ (HEAD + 1).T
    assert large.loss == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-6)
    assert small.loss == pytest.approx(large.loss, rel=1e-6)
    assert large.value == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    assert small.predictions == large.predictions


@pytest.mark.parametrize("others", [{}, {"c": 0.3}])
def test_a_plane_has_every_points_loss_and_disagreement(others) -> None:
    model = TinyEncoder()
    base, ends = make_experts(model)
    alphas = [-0.5, 0.0, 1.0]
    both = make_tasks()
    rows = list(evaluate_plane(model, Weights(model, base, ends), both, ("a", "b"), alphas, others=others))

    def predict(state, name):
        model.load_state_dict(state)
        return both[name].score(model)

    for i, first in enumerate(alphas):
        for j, second in enumerate(alphas):
            merged = move(base, ends, a=first, b=second, **others)
            scores = {name: predict(merged, name) for name in both}
            xi = 0.0
            for name, a in (("a", first), ("b", second)):
                alone = predict(move(base, ends, **{name: a}), name).predictions
                xi += sum(x != y for x, y in zip(scores[name].predictions, alone, strict=True)) / 31
            assert rows[i]["xi"][j] == pytest.approx(xi)
            for name in both:
                assert rows[i][f"loss/{name}"][j] == pytest.approx(scores[name].loss, rel=1e-5)
                assert rows[i][f"value/{name}"][j] == pytest.approx(scores[name].value)
    assert max(v for row in rows for v in row["xi"]) > 0


def test_a_plane_goes_on_from_any_row() -> None:
    model = TinyEncoder()
    base, ends = make_experts(model)
    weights = Weights(model, base, ends)
    whole = list(evaluate_plane(model, weights, make_tasks(), ("a", "b"), [0.0, 0.5, 1.0]))
    assert list(evaluate_plane(model, weights, make_tasks(), ("a", "b"), [0.0, 0.5, 1.0], start=1)) == whole[1:]


def test_where_a_vector_is_alone_nothing_is_entangled() -> None:
    model = TinyEncoder()
    base, ends = make_experts(model)
    ends["b"] = dict(base)
    rows = list(evaluate_plane(model, Weights(model, base, ends), make_tasks(), ("a", "b"), [0.0, 1.0]))
    assert rows[0]["xi"] == [0.0, 0.0]
    assert rows[1]["xi"][0] == rows[1]["xi"][1]


def test_a_line_is_the_plane_without_the_other() -> None:
    model = TinyEncoder()
    base, ends = make_experts(model)
    along = evaluate_line(model, base, ends["a"], [0.0, 0.5], make_tasks())
    across = list(evaluate_plane(model, Weights(model, base, ends), make_tasks(), ("a", "b"), [0.0, 0.5]))
    assert along["b"]["loss"] == [across[0]["loss/b"][0], across[1]["loss/b"][0]]


def test_a_barrier_is_the_rise_above_the_straight_line() -> None:
    assert measure_barrier([1.0, 3.0, 3.0], [0.0, 0.25, 1.0]) == pytest.approx(1.5)
    assert measure_barrier([2.0, 1.5, 1.0], [0.0, 0.5, 1.0]) == 0
    assert measure_barrier([2.0, 0.0, 1.0], [0.0, 0.5, 1.0]) == 0


class RandomRows(Objective):
    """Nine random rows, which a model maps to its logits."""

    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))

    def __init__(self) -> None:
        super().__init__(TinyTask())

    def make_batch(self, part, index):
        return self.x[index], torch.zeros(len(index), dtype=torch.int64)

    count_items = compute_loss = predict = measure = None


class Deep(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.act = act

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return x


def test_ctl_is_its_definition_per_block() -> None:
    model = Deep(nn.Tanh())
    base, ends = make_experts(model, ("a", "b"))
    x = RandomRows.x
    samples = [Sample(RandomRows(), "train", torch.arange(9))]
    blocks = find_blocks(model)
    assert list(blocks) == ["layers.0", "layers.1", "layers.2"]
    linearity = cross_task_linearity(
        model, blocks, Weights(model, base, ends), ("a", "b"), samples, batch_size=4
    )

    def compute_features(state):
        model.load_state_dict(state)
        kept, y = [], x
        for layer in model.layers:
            kept.append(layer(y).detach())
            y = torch.tanh(kept[-1])
        return kept

    weights = [{"a": 0.3, "b": 0.3}, {"a": 0.6}, {"b": 0.6}]
    merged, one, other = (compute_features(move(base, ends, **p)) for p in weights)
    for value, m, s, t in zip(linearity.values(), merged, one, other, strict=True):
        near = nn.functional.cosine_similarity(m, (s + t) / 2, dim=1)
        assert value == pytest.approx(float((1 - near).mean()), abs=1e-6)
    assert linearity["layers.0"] == pytest.approx(0, abs=1e-6)
    assert linearity["layers.2"] > 1e-4


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="no list of blocks"):
        find_blocks(nn.Linear(2, 2))
