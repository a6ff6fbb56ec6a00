"""What a card says of its inputs holds for them."""

import hashlib
import json
import struct
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import markdown_it
import pytest
import yaml

from mergekit_lab import open_checkpoint
from mergekit_lab.checkpoints import fingerprint
from mergekit_lab.checkpoints.card import SAMPLED, Card


def write_holes(file: Path, mebibytes: int, mark: int | None = None) -> Path:
    """One large tensor of zeros, with a one at a place."""
    size = mebibytes << 20
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + size)
        if mark is not None:
            opened.seek(8 + len(header) + mark)
            opened.write(b"\1")
    return file


def summarize_file(file: Path) -> dict[str, object]:
    return dict(fingerprint(open_checkpoint(file))["files"][file.name])


def make_card(file: Path, name: str = "cars", **more: Any) -> str:
    base = fingerprint(open_checkpoint(file))
    return Card(
        name, "TIES", {name: name}, base, {name: base}, {name: [name]}, {"torch": "2"}, **more
    ).format_text()


def test_small_files_have_their_sha256(tmp_path) -> None:
    small = write_holes(tmp_path / "small.safetensors", 1)
    assert summarize_file(small) == {
        "bytes": small.stat().st_size,
        "sha256": hashlib.sha256(small.read_bytes()).hexdigest(),
    }
    assert SAMPLED not in make_card(small)


def test_a_name_is_taken_for_the_hash_only_in_the_hubs_cache(tmp_path) -> None:
    name, link = "0" * 64, tmp_path / "model.safetensors"
    for folder, bytes_read in (("elsewhere", True), ("blobs", False)):
        (tmp_path / folder).mkdir()
        blob = write_holes(tmp_path / folder / name, 1)
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
        assert (summarize_file(link)["sha256"] != name) is bytes_read


def test_large_files_are_sampled_and_the_card_says_what_that_does_not_see(tmp_path) -> None:
    large = write_holes(tmp_path / "large.safetensors", 40)
    hashes = {
        mark: summarize_file(write_holes(tmp_path / "marked.safetensors", 40, mark))["sampled_sha256"]
        for mark in (0, 1 << 19)
    }
    assert hashes[0] != summarize_file(large)["sampled_sha256"]
    assert hashes[1 << 19] == summarize_file(large)["sampled_sha256"]
    assert "over 32 MiB" in SAMPLED
    assert SAMPLED in make_card(large)


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        "[click](javascript:alert(1))",
        "![](https://example.org/a.png)",
        "a|b|c",
        "**bold** _it_ `code` ~~gone~~",
        "two\nlines\r\n# head",
        "&lt;b&gt;",
        "\\",
        "- item",
        "snake_case_name",
        "\u202eelbisrever",
    ],
)
def test_a_name_is_shown_in_a_card_as_it_is_and_nothing_of_it_is_markup(name: str, tmp_path) -> None:
    text = make_card(
        write_holes(tmp_path / "a.safetensors", 1), name, notes=[name], metrics={name: 1.0}, hub_ids=[name]
    )
    head, _, body = text.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head)["base_model"] == [name]
    page = TagCounter()
    page.feed(markdown_it.MarkdownIt("gfm-like", {"linkify": False}).render(body))
    tables = ["table", "thead", "tbody", "tr", "th", "td"]
    assert page.tags.keys() - {"br"} == {"h1", "h2", "p", "strong", "code", "ul", "li", *tables}
    assert [page.tags[tag] for tag in ("h1", "table", "tr", "li", "strong", "code")] == [1, 4, 9, 1, 1, 1]
    shown = "".join(c if c.isprintable() else " " for c in name.replace("\n", ""))
    assert page.texts.count(shown.strip()) >= 2


class TagCounter(HTMLParser):
    """Tags by how often they stand in a page, and its texts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.texts: list[str] = [""]

    def handle_starttag(self, tag, attributes) -> None:
        self.tags[tag] += 1
        if tag != "br":
            self.texts.append("")

    def handle_data(self, data) -> None:
        self.texts[-1] += data.strip("\n")


def test_a_recipe_cannot_leave_its_fence(tmp_path) -> None:
    recipe = "models: []\n```\n<b>loose</b>\n````\n"
    text = make_card(write_holes(tmp_path / "a.safetensors", 1), recipe=recipe)
    tokens = markdown_it.MarkdownIt().parse(text)
    (fence,) = [token for token in tokens if token.type == "fence"]
    assert fence.content.strip() == recipe.strip()
