"""Classify images by an encoder and a frozen head: cross-entropy of `features @ head.T`, top-1 accuracy.

Legend: N images, C classes, D embedding width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mergekit_lab.backbones.attention import keep_differentiable
from mergekit_lab.backbones.objective import Assessment, Objective
from mergekit_lab.batches import Batch, count_samples
from mergekit_lab.prefetch import prefetch
from mergekit_lab.tasks import ImageTask, Packed, Part, draw_boxes

_RESIDENT_SHARE = 0.25
_AHEAD = 2


class ImageEncoder(nn.Module):
    """An image tower with its preprocessing: it maps pictures to unit vectors.

    Parameters and buffers in `state_dict` are named as in open_clip's whole model (`visual.…`), so a
    checkpoint of this module merges with, and loads into, any other of the same architecture.

    core: the submodule that is linearized, which leaves out preprocessing and the features' normalization.
    """

    core: ClassVar[str] = "visual"
    mean: Tensor
    std: Tensor

    def __init__(self, visual: nn.Module, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.visual = visual
        self.size = size
        self.register_buffer("mean", torch.tensor(mean).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).reshape(3, 1, 1), persistent=False)
        self.eval()

    def train(self, mode: bool = True) -> ImageEncoder:
        """Set the mode as usual, but keep attention differentiable by `torch.func`."""
        super().train(mode)
        keep_differentiable(self)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Map images, uint8 or float in [0, 1], `[N, 3, H, W]`, to L2-normalized features `[N, D]`.

        Images of another size than the model's are resized (bicubic, antialiased, ignoring the aspect ratio).
        """
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        if images.shape[-2:] != self.size:
            images = functional.interpolate(images, size=self.size, mode="bicubic", antialias=True).clamp(0, 1)
        return functional.normalize(self.visual((images - self.mean) / self.std), dim=-1)


class Classifier(nn.Module):
    """An encoder with a frozen head: `forward(images)` gives logits `[N, C] = features @ head.T`.

    encoder: returns features `[N, D]`. head: `[C, D]`. The head is no parameter and not in `state_dict`: only
    the encoder is trained, saved and merged.
    """

    head: Tensor

    def __init__(self, encoder: nn.Module, head: Tensor):
        super().__init__()
        self.encoder = encoder
        self.register_buffer("head", head.detach().clone(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the images' logits `[N, C]`."""
        features: Tensor = self.encoder(images)
        return features @ self.head.T


@dataclass(frozen=True)
class Crops:
    """Random windows of training pictures, resized to squares, as in the published recipe.

    Attributes:
        scale: range of the window's share of the picture's area, in (0, 1].
        flip: mirror each picture with probability ½.
        side: pixels of a square's side.
    """

    scale: tuple[float, float]
    flip: bool
    side: int

    def __call__(self, pictures: Packed, seed: int) -> Tensor:
        """float32 `[N, 3, side, side]` in [0, 1], on the device of the pictures.

        Args:
            pictures: as they are read.
            seed: decides windows and mirroring.
        """
        generator = torch.Generator().manual_seed(seed)
        boxes = draw_boxes(torch.from_numpy(pictures.sizes), generator, self.scale)
        flips = torch.rand(len(boxes), generator=generator) < 0.5 if self.flip else None
        return pictures.cut_windows(boxes, self.side, flips) / 255


class ImageObjective(Objective):
    """An image task with its head.

    Validation images stay on a GPU if they take at most a quarter of its free memory.

    Args:
        task: its images go to the encoder as uint8.
        head: `[C, D]`, frozen.
        crops: crops of training pictures; None trains on the images that evaluation sees.
        precision: arithmetic of the forward pass in evaluation, "float32" or "bfloat16".
    """

    task: ImageTask
    head: Tensor
    fixes_shapes = True
    replays_forward = True
    reading_threads = 4

    def __init__(
        self, task: ImageTask, head: Tensor, crops: Crops | None = None, precision: str = "float32"
    ) -> None:
        super().__init__(task)
        self.register_buffer("head", head.detach().clone(), persistent=False)
        self.crops = crops
        self.precision = precision
        self._resident: Tensor | None = None
        self._expected: deque[Tensor] = deque()
        self._coming: Iterator[tuple[Tensor, torch.cuda.Event]] = iter(())

    def make_batch(self, part: Part, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.task.load_samples(part).take(index)

    def make_training_batch(self, index: Tensor) -> Batch:
        if self.crops is None:
            return self.make_batch("train", index)
        samples = self.task.load_samples("train")
        return samples.pack(index), samples.labels[index]

    def augment(self, batch: Any, seed: int) -> Batch:
        if self.crops is None:
            return batch
        pictures, labels = batch
        return self.crops(pictures, seed), labels

    def count_items(self, batch: Batch) -> int:
        return count_samples(batch)

    def compute_loss(self, model: nn.Module, batch: Any, *, label_smoothing: float = 0.0) -> Tensor:
        images, labels = batch
        logits = model(images) @ self.head.T
        return functional.cross_entropy(logits, labels, label_smoothing=label_smoothing) * len(labels)

    def with_head(self, model: nn.Module) -> nn.Module:
        return Classifier(model, self.head)

    def expect(self, part: Part, chunks: Sequence[Tensor]) -> None:
        self._expected, self._coming = deque(), iter(())
        if self.head.is_cuda and not self._is_resident(part):
            load = partial(_load, self.task.load_samples(part).images, torch.cuda.Stream(self.head.device))
            self._expected, self._coming = deque(chunks), prefetch(load, chunks, ahead=_AHEAD)

    def _read_images(self, part: Part, index: Tensor) -> Tensor:
        """Images uint8 `[N, 3, H, W]` on the head's device."""
        if self._is_resident(part):
            assert self._resident is not None
            return self._resident[index.to(self._resident.device)]
        if self._expected and torch.equal(self._expected[0], index):
            self._expected.popleft()
            moved, event = next(self._coming)
            current = torch.cuda.current_stream(self.head.device)
            current.wait_event(event)
            moved.record_stream(current)
            return moved
        return self.task.load_samples(part).images[index].to(self.head.device)

    def _is_resident(self, part: Part) -> bool:
        if part != "validation" or not self.head.is_cuda:
            return False
        if self._resident is None or self._resident.device != self.head.device:
            images = self.task.load_samples(part).images
            free, _ = torch.cuda.mem_get_info(self.head.device)
            size = torch.Size(images.shape).numel()
            self._resident = images[:].to(self.head.device) if size <= _RESIDENT_SHARE * free else None
        return self._resident is not None

    def _compute_logits(self, model: nn.Module, images: Tensor) -> Tensor:
        device = self.head.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.precision == "bfloat16"):
            features = model(images)
        with torch.autocast(device, enabled=False):
            return features.to(self.head.dtype) @ self.head.T

    def predict(self, model: nn.Module, part: Part, index: Tensor) -> Tensor:
        return self._compute_logits(model, self._read_images(part, index)).argmax(dim=-1)

    def assess(self, model: nn.Module, part: Part, index: Tensor) -> Assessment:
        logits = self._compute_logits(model, self._read_images(part, index))
        labels = self.task.load_samples(part).labels[index].to(logits.device)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return Assessment(loss, len(labels), logits.argmax(dim=-1))

    def measure(self, predictions: Sequence[Any], part: Part, index: Tensor) -> dict[str, float]:
        hits = self.score_samples(predictions, part, index)
        return {"accuracy": sum(hits) / len(hits)}

    def score_samples(self, predictions: Sequence[Any], part: Part, index: Tensor) -> Sequence[float]:
        hits: list[float] = (torch.tensor(predictions) == self.task.load_samples(part).labels[index]).tolist()
        return hits


def _load(images: Any, stream: torch.cuda.Stream, index: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A chunk on its way to the stream's device, and the event of its arrival.

    It is copied into memory that the GPU reads by itself while it computes on earlier chunks.
    """
    first, last = int(index[0]), int(index[-1])
    in_a_row = len(index) == last - first + 1 and bool((index.diff() == 1).all())
    pixels = images[first : last + 1] if in_a_row else images[index]
    held = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=True).copy_(pixels)
    with torch.cuda.stream(stream):
        moved = held.to(stream.device, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return moved, event
