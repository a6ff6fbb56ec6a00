import pytest
import torch
from sklearn.metrics import accuracy_score
from tiny import make_tiny_objective

from mergekit_lab import InputError
from mergekit_lab.evaluation import Candidate, choose_best, normalize, score


def test_accuracy_equals_scikit_learns_for_any_batch_size(encoder, head) -> None:
    objective = make_tiny_objective(head, other_size=50)
    split = objective.task.load_samples("test")
    encoder.eval()
    predicted = (encoder(split.images) @ head.T).argmax(-1)
    wanted = accuracy_score(split.labels, predicted)
    for size in (1, 7, 50, 512):
        scores = score(encoder, objective, "test", batch_size=size)
        assert scores.value == scores.metrics["accuracy"] == pytest.approx(wanted)
        assert scores.predictions == predicted.tolist()


def test_a_part_of_the_samples_is_scored_in_the_order_they_are_named(encoder, head) -> None:
    objective = make_tiny_objective(head, other_size=50)
    whole = score(encoder, objective, "test").predictions
    index = torch.tensor([40, 3, 17])
    assert score(encoder, objective, "test", index=index).predictions == [whole[i] for i in index]


def test_evaluation_leaves_the_mode_and_gradients_alone(encoder, head) -> None:
    encoder.train()
    score(encoder, make_tiny_objective(head), "validation", with_loss=True)
    assert encoder.training
    assert all(p.grad is None for p in encoder.parameters())


def test_normalized_accuracy_is_the_mean_of_ratios_not_the_ratio_of_means() -> None:
    assert normalize({"a": 0.5, "b": 0.4}, {"a": 1.0, "b": 0.5}) == pytest.approx((0.5 + 0.8) / 2)


def test_the_best_candidate_is_the_highest_and_of_equals_the_nearest_to_the_base() -> None:
    curve = [Candidate(a, {}, n) for a, n in [(0.2, 0.5), (1.0, 0.9), (0.5, 0.9), (-1.5, 0.9)]]
    assert choose_best(curve).coefficient == 0.5


def limit_memory_of(objective, limit: int, monkeypatch) -> list[int]:
    """More samples than `limit` at a time do not fit; what was tried."""
    tried: list[int] = []

    def limit_memory(answer):
        def answer_or_fail(model, part, index):
            tried.append(len(index))
            if len(index) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
            return answer(model, part, index)

        return answer_or_fail

    for name in ("predict", "assess"):
        monkeypatch.setattr(objective, name, limit_memory(getattr(objective, name)))
    return tried


@pytest.mark.parametrize("with_loss", [False, True])
def test_out_of_memory_halves_the_samples_at_a_time_and_later_scores_begin_there(
    encoder, head, with_loss, monkeypatch, caplog
) -> None:
    objective = make_tiny_objective(head, other_size=50)
    whole = score(encoder, objective, "test", with_loss=with_loss)
    tried = limit_memory_of(objective, 12, monkeypatch)
    again = score(encoder, objective, "test", batch_size=20, with_loss=with_loss)
    assert tried == [20, 10, 10, 10, 10, 10]
    assert again.predictions == whole.predictions
    assert again.loss == pytest.approx(whole.loss, nan_ok=True)
    assert "evaluation_batch_size=10" in caplog.text
    tried.clear()
    score(encoder, objective, "validation", with_loss=with_loss)
    assert tried == [10] * 5


def test_one_sample_that_does_not_fit_says_what_to_set(encoder, head, monkeypatch) -> None:
    objective = make_tiny_objective(head)
    limit_memory_of(objective, 0, monkeypatch)
    with pytest.raises(InputError, match=r"evaluation_batch_size=1.*Tried.*allocate 2 GiB\).*device=cpu"):
        score(encoder, objective, "test")
