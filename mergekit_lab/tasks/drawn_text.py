"""Text tasks whose samples come from a seeded generator: they need no download."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from mergekit_lab.errors import InputError

from .task import PARTS, Part
from .text import TextSamples, TextTask

_PATIENCE = 2000
"""Samples that were there already, one after another, before it is said that there are no more."""


@dataclass(frozen=True)
class DrawnText(TextTask):
    """Samples of one kind. No prompt is in two parts.

    Args:
        kind: what is drawn; a subclass says which kinds there are.
        train_size, validation_size, test_size: samples, at least 1.
        seed: draws them.
    """

    kind: str = ""
    train_size: int = 1
    validation_size: int = 1
    test_size: int = 1
    seed: int = 0

    stream: ClassVar[str] = ""
    """What tells this class's draws from another's of the same kind and seed."""

    @abstractmethod
    def draw_sample(self, draw: Random) -> tuple[str, str]:
        """A prompt and its answer."""

    def make(self, part: Part) -> TextSamples:
        draw, seen = Random(f"{self.stream}{self.kind}/{self.seed}"), set()
        sizes = {name: int(getattr(self, f"{name}_size")) for name in reversed(PARTS)}
        for name, size in sizes.items():
            samples: dict[str, str] = {}
            misses = 0
            while len(samples) < size:
                prompt, answer = self.draw_sample(draw)
                misses = misses + 1 if prompt in seen else 0
                if misses >= _PATIENCE:
                    raise InputError(
                        f"task {self.name!r}: there are fewer than {sum(sizes.values())} different samples of "
                        f"kind {self.kind!r}: lower its sizes"
                    )
                if prompt not in seen:
                    seen.add(prompt)
                    samples[prompt] = answer
            if name == part:
                break
        return TextSamples(tuple(samples), tuple(samples.values()))
