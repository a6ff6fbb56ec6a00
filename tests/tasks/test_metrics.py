"""Each metric equals published or independently computed values."""

import pytest
from scipy.stats import spearmanr
from sklearn.metrics import matthews_corrcoef

from mergekit_lab import InputError
from mergekit_lab.tasks.metrics import (
    MEANS,
    METRICS,
    accuracy,
    first_character,
    lenient_accuracy,
    matthews,
    rouge_l,
    rouge_l_trace,
    sari,
    score_sari,
    spearman,
)

SPECIES = "About 95 species are currently accepted."
SIMPLER = [
    "About 95 species are currently known.",
    "About 95 species are now accepted.",
    "95 species are now accepted.",
]


def test_sari_is_the_value_published_with_the_metrics_public_implementation() -> None:
    """The example on the card of `sari` in Hugging Face's evaluate."""
    assert 100 * score_sari(SPECIES, "About 95 you now get in.", SIMPLER) == pytest.approx(26.953601953601954)


def test_sari_by_hand() -> None:
    """Source `a b`, reference `a c`. Output `a c`: all that was done was wanted; `a b`: keeping `a` was."""
    assert sari(["a c"], ["a c"], ["a b"]) == pytest.approx(1.0)
    one = {"keep": 2 * 0.5 / 1.5, "delete": 1.0, "add": 0.0}
    two = {"keep": 0.0, "delete": 1.0, "add": 0.0}
    longer = {"keep": 1.0, "delete": 1.0, "add": 1.0}
    wanted = sum(sum(g.values()) for g in (one, two, longer, longer)) / 12
    assert sari(["a b"], ["a c"], ["a b"]) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("source", "prediction", "reference", "value"),
    [
        ("It began in 2005.", "It began in 2005.", "It began in 2005", 0.9343915343915343),
        ("R&amp;D cost 3.", "R&D cost 3", "R&D cost 3 .", 0.6212602212602213),
        ("One\ntwo-\nthree", "", "Two", 0.9166666666666666),
        (".5 < 1", "less than 1", "<skipped> 5 < 1", 0.38888888888888884),
    ],
)
def test_sari_splits_words_as_sacrebleu_does(source, prediction, reference, value) -> None:
    """Values of the formula over sacreBLEU 2.6's own tokenizer, "13a"."""
    assert score_sari(source, prediction, [reference]) == pytest.approx(value, abs=1e-12)


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence() -> None:
    assert rouge_l(["police killed the gunman"], ["police kill the gunman"]) == pytest.approx(0.75)
    assert rouge_l(["the gunman kill police"], ["police kill the gunman"]) == pytest.approx(
        0.5
    )  # Lin 2004, section 3.1
    assert rouge_l(["a b", "c"], ["a b", "d"]) == pytest.approx(0.5)
    assert rouge_l(["the cat"], ["the cat sat on the mat"]) == pytest.approx(2 * 1 * (2 / 6) / (1 + 2 / 6))


@pytest.mark.parametrize(
    ("prediction", "reference", "value"),
    [
        ("the cat sat on the mat. it was warm.", "the cat was on the mat. it slept.", 0.7999999950222222),
        ("police killed the gunman", "police kill the gunman", 0.749999995),
        ("the gunman kill police", "police kill the gunman", 0.4999999950000001),
        ("The Council met. It voted 5 to 2.", "the council met. The vote was 5 to 2.", 0.5882352891349482),
        ("a b c a b", "b a c b a", 0.6666666616666668),
        ("one . two", "two. one . three", 0.7999999952000001),
        ("Der Rat stimmt zu", "Der Rat stimmt dem Antrag zu. Er gilt ab Mai.", 0.5714285673469389),
        ("yes", "no", 0.0),
    ],
)
def test_traces_rouge_l_is_that_of_the_package_it_takes(prediction: str, reference: str, value: float) -> None:
    """Values of `rouge` 1.0.1 from PyPI, `get_scores` of rouge-l."""
    assert rouge_l_trace([prediction], [reference]) == pytest.approx(value, abs=1e-15)


def test_a_prediction_without_words_has_no_rouge() -> None:
    assert rouge_l_trace(["", "..."], ["a", "a"]) == 0.0


def test_strict_accuracy_wants_the_very_text_and_lenient_forgives() -> None:
    answers, wanted = ["Yes", " yes.", "no", ""], ["Yes", "Yes", "No", "Yes"]
    assert accuracy(answers, wanted) == 0.25
    assert lenient_accuracy(answers, wanted) == 0.75
    assert first_character(["A. because", " A", "B"], ["A", "A", "B"]) == pytest.approx(2 / 3)


def test_correlations_equal_those_of_scikit_learn_and_scipy() -> None:
    answers = ["acceptable", "unacceptable", "acceptable", "acceptable ", "unacceptable", "nonsense"]
    wanted = ["acceptable", "acceptable", "unacceptable", "acceptable", "unacceptable", "acceptable"]
    positive = [[x.strip() == "unacceptable" for x in side] for side in (answers, wanted)]
    assert matthews(answers, wanted) == pytest.approx(matthews_corrcoef(positive[1], positive[0]))
    answers, wanted = ["1.0", "3.5", "2.0", "5.0", "no number"], ["0.2", "3.0", "2.6", "2.8", "1.0"]
    numbers = [1.0, 3.5, 2.0, 5.0, 0.0]
    assert spearman(answers, wanted) == pytest.approx(
        spearmanr(numbers, [0.2, 3.0, 2.6, 2.8, 1.0]).statistic, abs=1e-5
    )
    assert spearman(["1", "1"], ["1", "2"]) == 0.0
    assert spearman(["1"], ["2"]) == 0.0
    for odd in ("nan", "inf", "-1e999"):
        assert spearman([*answers[:-1], odd], wanted) == spearman(answers, wanted)


@pytest.mark.parametrize("name", METRICS)
def test_a_perfect_answer_scores_one(name) -> None:
    texts = ["1.0", "2.0", "3.5"] if name == "spearman" else ["a small house", "b", "a small house"]
    assert METRICS[name](texts, texts, ["some long source", "c", "another"]) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", METRICS)
def test_lists_that_do_not_fit_and_empty_ones_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="2 predictions have 1 references"):
        METRICS[name](["1", "2"], ["1"], ["a", "b"])
    with pytest.raises(InputError, match="1 predictions have 2 sources"):
        METRICS[name](["1"], ["1"], ["a", "b"])
    with pytest.raises(InputError, match="there are none"):
        METRICS[name]([], [], [])


def test_a_metric_of_sources_asks_for_them() -> None:
    with pytest.raises(InputError, match="sari also needs sources"):
        METRICS["sari"](["a"], ["a"])


@pytest.mark.parametrize("name", sorted(MEANS))
def test_a_mean_is_that_of_its_samples(name: str) -> None:
    answers, wanted, sources = ["a b", "yes.", "c"], ["a c", "Yes", "c d"], ["a b c", "no", "d"]
    each = [METRICS[name]([p], [r], [s]) for p, r, s in zip(answers, wanted, sources, strict=True)]
    assert METRICS[name](answers, wanted, sources) == pytest.approx(sum(each) / 3, abs=1e-6)
