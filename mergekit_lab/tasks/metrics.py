"""Metrics of text: functions of a whole part's predictions, references and (for SARI) sources.

Values are at most 1, and larger is better. `accuracy` is strict: the exact text, as TRACE compares it.
`lenient_accuracy` ignores case, surrounding white space, and a full stop at the end.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature

import torch

from mergekit_lab.errors import InputError

Metric = Callable[..., float]
"""Of predictions, references and sources (the prompts), a list each."""

METRICS: dict[str, Metric] = {}
"""By name; `metric` puts them here."""
MEANS: set[str] = set()
"""Those that are means over samples; the others are of all of them at once."""


def register_metric(*, mean: bool) -> Callable[[Metric], Metric]:
    """Register a function of predictions and references as a metric under its name; of `sources` (the prompts)
    too, if it has an argument of that name. It gets lists of equal length, at least one sample.

    Args:
        mean: whether its value is a mean over samples.
    """

    def register(function: Metric) -> Metric:
        reads = signature(function).parameters.get("sources")

        @wraps(function)
        def check_and_score(
            predictions: Sequence[str], references: Sequence[str], sources: Sequence[str] | None = None
        ) -> float:
            if not len(predictions):
                raise InputError(f"{function.__name__} needs predictions, and there are none")
            if reads and reads.default is reads.empty and sources is None:
                raise InputError(f"{function.__name__} also needs sources (the prompts)")
            for kind, texts in (("references", references), ("sources", sources)):
                if texts is not None and len(texts) != len(predictions):
                    raise InputError(
                        f"{function.__name__}: {len(predictions)} predictions have {len(texts)} {kind}; one "
                        "each is needed"
                    )
            return function(predictions, references, *((sources,) if reads and sources is not None else ()))

        METRICS[function.__name__] = check_and_score
        if mean:
            MEANS.add(function.__name__)
        return check_and_score

    return register


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def normalize(text: str) -> str:
    """Lower the case, and strip surrounding white space and a full stop at the end."""
    return text.strip().removesuffix(".").removesuffix("。").strip().casefold()


@register_metric(mean=True)
def accuracy(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The share of predictions that equal the reference, character by character."""
    return _average([p == r for p, r in zip(predictions, references, strict=True)])


@register_metric(mean=True)
def lenient_accuracy(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The same after `normalize` on both sides."""
    return _average([normalize(p) == normalize(r) for p, r in zip(predictions, references, strict=True)])


@register_metric(mean=True)
def first_character(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The share of predictions that begin with the reference's first character: TRACE's ScienceQA.

    Leading white space counts as a character, as it does in TRACE.
    """
    return _average([p[:1] == r[:1] for p, r in zip(predictions, references, strict=True)])


@register_metric(mean=True)
def rouge_l(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Mean F1 of the longest common subsequence of words (Lin 2004), by torchmetrics.

    Tokens are Google's: lower case, letters a-z and digits. `rouge_l_trace` is TRACE's.
    """
    from torchmetrics.functional.text import rouge_score

    scores = rouge_score(list(predictions), list(references), rouge_keys="rougeL")
    return float(scores["rougeL_fmeasure"])


@register_metric(mean=True)
def rouge_l_trace(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Mean F1 of summary-level ROUGE-L, as TRACE's script computes it with PyPI's `rouge`.

    Sentences end at full stops, words at white space, and case counts. Hits are the distinct words in the
    longest common subsequences of all pairs of sentences. Recall is their share of the reference's distinct
    words, precision of the prediction's. A prediction without words scores 0; TRACE's script skips it.
    """
    return _average([_score_summary(p, r) for p, r in zip(predictions, references, strict=True)])


def _score_summary(prediction: str, reference: str) -> float:
    predicted, wanted = (_split_sentences(text) for text in (prediction, reference))
    if not predicted or not wanted:
        return 0.0
    hits = {word for r in wanted for p in predicted for word in _find_longest_common_subsequence(r, p)}
    precision, recall = (len(hits) / len(set().union(*sentences)) for sentences in (predicted, wanted))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _split_sentences(text: str) -> list[list[str]]:
    """Words by sentence; white space between two full stops is a sentence of one empty word."""
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _find_longest_common_subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """Of several as long, the one that is met first by going backwards and shortening `y` before `x`."""
    lengths = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i, a in enumerate(x, start=1):
        for j, b in enumerate(y, start=1):
            lengths[i][j] = lengths[i - 1][j - 1] + 1 if a == b else max(lengths[i - 1][j], lengths[i][j - 1])
    words, i, j = [], len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            words.append(x[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


@register_metric(mean=True)
def sari(predictions: Sequence[str], references: Sequence[str], sources: Sequence[str]) -> float:
    """Mean SARI of sentences against their source (Xu et al. 2016, section 4), as a fraction.

    The mean over n-grams of 1 to 4 words, and over keeping (F1), adding (F1) and deleting (precision). It takes
    one reference; `score_sari` takes several. Words are split as sacreBLEU's 13a splits lower-case text.
    """
    return _average([score_sari(s, p, [r]) for s, p, r in zip(sources, predictions, references, strict=True)])


def score_sari(source: str, prediction: str, references: Sequence[str]) -> float:
    """SARI of one prediction, in [0, 1].

    As in the authors' corrected code, making no operation scores 1 if none was needed.
    """
    words = [_split_words(text.lower()) for text in (source, prediction, *references)]
    keep, delete, add = 0.0, 0.0, 0.0
    for n in range(1, 5):
        s, c, *rs = (_count_grams(text, n) for text in words)
        k, d, a = _score_operations(s, c, rs)
        keep, delete, add = keep + k / 4, delete + d / 4, add + a / 4
    return (keep + delete + add) / 3


def _score_operations(
    s: Counter[str], c: Counter[str], rs: Sequence[Counter[str]]
) -> tuple[float, float, float]:
    """F1 of keeping, precision of deleting, F1 of adding; n-grams count as often as there are references."""
    count = len(rs)
    r = sum(rs, Counter[str]())
    s_all = Counter({g: n * count for g, n in s.items()})
    c_all = Counter({g: n * count for g, n in c.items()})

    kept, right = s_all & c_all, s_all & c_all & r
    wanted = s_all & r
    precision = _divide(sum(right[g] / kept[g] for g in right), len(kept))
    recall = _divide(right.total(), wanted.total())
    keep = _compute_f1(precision, recall)

    gone = s_all - c_all
    rightly = gone - r
    delete = _divide(sum(rightly[g] / gone[g] for g in rightly), len(gone))

    added, missing = set(c) - set(s), set(r) - set(s)
    good = added & set(r)
    return keep, delete, _compute_f1(_divide(len(good), len(added)), _divide(len(good), len(missing)))


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _compute_f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


_WRITTEN = {
    "<skipped>": "", "-\n": "", "\n": " ", "&quot;": '"', "&amp;": "&", "&lt;": "<", "&gt;": ">",
}  # fmt: skip
"""What 13a reads otherwise than it is written, in this order."""


def _split_words(text: str) -> list[str]:
    """sacreBLEU's 13a: punctuation stands alone, but for points and commas within numbers. No text is one word,
    the empty one, as in the public implementation."""
    for written, read in _WRITTEN.items():
        text = text.replace(written, read)
    text = re.sub(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])", r" \1 ", f" {text} ")
    text = re.sub(r"([^0-9])([\.,])", r"\1 \2 ", text)
    text = re.sub(r"([\.,])([^0-9])", r" \1 \2", text)
    return re.sub(r"([0-9])(-)", r"\1 \2 ", text).split() or [""]


def _count_grams(words: Sequence[str], n: int) -> Counter[str]:
    return Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))


@register_metric(mean=False)
def matthews(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Matthews' correlation coefficient of two labels (GLUE's CoLA), in [-1, 1]; 0 if one side is constant."""
    positive = sorted(set(references))[-1]
    p = torch.tensor([normalize(x) == normalize(positive) for x in predictions], dtype=torch.float64)
    r = torch.tensor([x == positive for x in references], dtype=torch.float64)
    p, r = p - p.mean(), r - r.mean()
    scale = float(p.norm() * r.norm())
    return float(p @ r) / scale if scale > 0 else 0.0


@register_metric(mean=False)
def spearman(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Rank correlation of numbers (GLUE's STS-B), in [-1, 1]. Text that is no number counts as 0."""
    from torchmetrics.functional.regression import spearman_corrcoef

    p, r = (
        torch.tensor([_read_number(x) for x in side], dtype=torch.float64) for side in (predictions, references)
    )
    if not (p.std(correction=0) > 0 and r.std(correction=0) > 0):
        return 0.0
    return float(spearman_corrcoef(p, r))


def _read_number(text: str) -> float:
    try:
        number = float(text.strip())
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0
