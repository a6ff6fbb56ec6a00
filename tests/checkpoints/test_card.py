"""What a card says of its inputs holds for them."""

import hashlib
import json
import struct
from pathlib import Path

from mergekit_lab import open_checkpoint
from mergekit_lab.checkpoints import Card, fingerprint
from mergekit_lab.checkpoints.card import SAMPLED


def holes(file: Path, mebibytes: int, mark: int | None = None) -> Path:
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


def told(file: Path) -> dict[str, object]:
    return dict(fingerprint(open_checkpoint(file))["files"][file.name])


def card(file: Path) -> str:
    base = fingerprint(open_checkpoint(file))
    return Card("merged", "TIES", {}, base, {"cars": base}, {}, {"torch": "2"}).text()


def test_small_files_have_their_sha256(tmp_path) -> None:
    small = holes(tmp_path / "small.safetensors", 1)
    assert told(small) == {
        "bytes": small.stat().st_size,
        "sha256": hashlib.sha256(small.read_bytes()).hexdigest(),
    }
    assert SAMPLED not in card(small)


def test_large_files_are_sampled_and_the_card_says_what_that_does_not_see(tmp_path) -> None:
    large = holes(tmp_path / "large.safetensors", 40)
    hashes = {
        mark: told(holes(tmp_path / "marked.safetensors", 40, mark))["sampled_sha256"] for mark in (0, 1 << 19)
    }
    assert hashes[0] != told(large)["sampled_sha256"]
    assert hashes[1 << 19] == told(large)["sampled_sha256"]
    assert "over 32 MiB" in SAMPLED
    assert SAMPLED in card(large)
