"""What may happen to a file or folder: cut, flipped, swapped, gone, or something else in its place."""

import os
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, int(path.stat().st_size * chance.random()))


def empty_file(path: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def swap(path: Path, chance: random.Random) -> None:
    """With another file of the same kind, from beside it or from a folder beside its own."""
    others = [f for f in path.parents[1].rglob(f"*{path.suffix}") if f != path and f.is_file()]
    if not others:
        return flip(path, chance)
    other = chance.choice(sorted(others))
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)
    return None


def nest(path: Path, chance: random.Random) -> None:
    path.write_text(chance.choice(["[", '{"a":']) * 100_000)


def grow(path: Path, chance: random.Random) -> None:
    """By zeros that take no room."""
    os.truncate(path, path.stat().st_size + (1 << 28))


def number(path: Path, chance: random.Random) -> None:
    """Some number of a text becomes one that nobody expects."""
    text = path.read_text(errors="replace")
    numbers = list(re.finditer(r"\d+", text))
    if numbers:
        begin, end = chance.choice(numbers).span()
        path.write_text(text[:begin] + chance.choice(["1e308", "-1", str(2**70), "NaN", '"x"']) + text[end:])


def make_replacement(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def replace(path: Path, chance: random.Random) -> None:
        delete(path, chance)
        make(path)

    return replace


def delete(path: Path, chance: random.Random) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


OF_ALL = {
    "delete": delete,
    "pipe": make_replacement(os.mkfifo),
    "device": make_replacement(lambda path: path.symlink_to("/dev/zero")),
    "loop": make_replacement(lambda path: path.symlink_to(path.name)),
    "link to nowhere": make_replacement(lambda path: path.symlink_to("nowhere")),
    "other type": None,
}
OF_FILES = {"truncate": truncate, "empty": empty_file, "flip": flip, "swap": swap, "grow": grow}
OF_TEXT = {"nest": nest, "number": number}


def mutate(root: Path, chance: random.Random) -> tuple[str, str]:
    """What was done to which file or folder."""
    paths = sorted(path for path in root.rglob("*") if not path.is_symlink())
    by_name = defaultdict(list)  # else the many files of a kind would leave no turn to the few
    for path in paths:
        by_name[path.name if path.is_file() else f"{path.parent.name[:8]}/"].append(path)
    path = chance.choice(by_name[chance.choice(sorted(by_name))])
    known = dict(OF_ALL)
    known["other type"] = make_replacement(Path.touch if path.is_dir() else Path.mkdir)
    if path.is_file():
        known |= OF_FILES
        if path.suffix in (".json", ".jsonl", ".yaml") or "locks" in path.parts:
            known |= OF_TEXT
    name = chance.choice(sorted(known))
    known[name](path, chance)
    return name, str(path.relative_to(root))
