import pytest
from sklearn.metrics import accuracy_score
from tiny import tiny_split

from mergekit_lab import InputError
from mergekit_lab.evaluation import Candidate, accuracy, best_candidate, normalised


def test_accuracy_equals_scikit_learns_for_any_batch_size(encoder, head) -> None:
    split = tiny_split(50)
    encoder.eval()
    predicted = (encoder(split.images) @ head.T).argmax(-1)
    wanted = accuracy_score(split.labels, predicted)
    for size in (1, 7, 50, 512):
        assert accuracy(encoder, head, split.images, split.labels, batch_size=size) == pytest.approx(wanted)


def test_evaluation_leaves_the_mode_and_gradients_alone(encoder, head) -> None:
    encoder.train()
    split = tiny_split(5)
    accuracy(encoder, head, split.images, split.labels)
    assert encoder.training
    assert all(p.grad is None for p in encoder.parameters())


def test_normalised_accuracy_is_the_mean_of_ratios_not_the_ratio_of_means() -> None:
    assert normalised({"a": 0.5, "b": 0.4}, {"a": 1.0, "b": 0.5}) == pytest.approx((0.5 + 0.8) / 2)


def test_an_expert_that_scores_zero_is_named() -> None:
    with pytest.raises(InputError, match="experts of b score 0"):
        normalised({"a": 0.5, "b": 0.4}, {"a": 1.0, "b": 0.0})


def test_the_best_candidate_is_the_highest_and_of_equals_the_nearest_to_the_base() -> None:
    curve = [Candidate(a, {}, n) for a, n in [(0.2, 0.5), (1.0, 0.9), (0.5, 0.9), (-1.5, 0.9)]]
    assert best_candidate(curve).coefficient == 0.5
