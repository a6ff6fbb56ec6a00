"""Decode images once, into bytes on disk.

There are two forms. For evaluation, an image is resized (bicubic, by its shorter side) and cut to a centered
square: `[N, 3, S, S]` in one file that is mapped into memory. For training, the whole picture is kept, its
shorter side at most 256 pixels. A random crop then shows what the published recipe crops from the original.
Threads decode, because Pillow releases Python's lock.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mergekit_lab.errors import InputError
from mergekit_lab.machine import count_cores
from mergekit_lab.prefetch import prefetch
from mergekit_lab.tasks.crops import center_boxes, resize
from mergekit_lab.tasks.sources import Rows
from mergekit_lab.triton_kernels import load_kernels

TRAINING_SIDE = 256
FORM = 1
"""Raise it when the same image would be kept as other bytes."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Of pictures in data sets. Pillow reads others by other programs: EPS by Ghostscript."""
_ELONGATED = 1000
"""A picture's longer side by its shorter one, at most: one row of pixels would be resized to gigabytes."""

T = TypeVar("T")


def map_chunks(
    rows: Rows, work: Callable[[range, list[bytes]], T], chunks: list[int] | None = None
) -> Iterator[T]:
    """Call `work` on chunks of rows, several at a time, and yield results in order."""
    wanted = range(len(rows.chunks)) if chunks is None else chunks
    threads = min(32, count_cores())

    def load(chunk: int) -> T:
        try:
            images = rows.load(chunk)
        except OSError as error:  # gone, or not ours to read, since it was listed
            raise InputError(f"images cannot be read: {error}") from None
        return work(rows.chunks[chunk], images)

    return prefetch(load, wanted, ahead=2 * threads, threads=threads)


def index_rows(rows: Rows) -> dict[str, np.ndarray]:
    """Hash every image and read its size, without decoding it.

    Returns `digests`, uint8 `[N, 16]`, of the encoded bytes, and `sizes`, int64 `[N, 2]`, height and width by
    the header, or zeros if the header cannot be read.
    """
    digests = np.zeros((len(rows), 16), np.uint8)
    sizes = np.zeros((len(rows), 2), np.int64)

    def work(span: range, images: list[bytes]) -> None:
        for row, encoded in zip(span, images, strict=True):
            digests[row] = np.frombuffer(hashlib.blake2b(encoded, digest_size=16).digest(), np.uint8)
            with suppress(OSError), open_image(encoded) as image:
                sizes[row] = image.height, image.width

    for _ in map_chunks(rows, work):
        pass
    return {"digests": digests, "sizes": sizes}


@contextmanager
def open_image(encoded: bytes) -> Iterator[Any]:
    """Open a picture with Pillow, if its format and size are ones that data sets have.

    Raises:
        OSError: it is no such picture, or has more pixels than Pillow opens. Decoding it later may raise too.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            if max(image.size) > _ELONGATED * min(image.size):
                raise OSError(f"{image.width}×{image.height} pixels are no picture")
            yield image
    except (SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise OSError(str(error)) from None


def decode(encoded: bytes) -> Any:
    """Decode a picture to RGB, as a Pillow image.

    Raises:
        OSError: it cannot be decoded, or has more pixels than Pillow opens.
    """
    with open_image(encoded) as image:
        return image.convert("RGB")


def fit_shorter_side(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Height and width after the shorter one becomes `side`, rounded as torchvision's `Resize` does."""
    height, width = size
    if height <= width:
        return side, max(side, int(side * width / height))
    return max(side, int(side * height / width)), side


def _resize_pixels(image: Any, height: int, width: int) -> np.ndarray:
    """Resized, uint8 `[3, height, width]`."""
    from PIL import Image

    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)


def _crop_center(image: Any, side: int) -> np.ndarray:
    height, width = fit_shorter_side((image.height, image.width), side)
    pixels = _resize_pixels(image, height, width)
    top, left = round((height - side) / 2), round((width - side) / 2)
    return pixels[:, top : top + side, left : left + side]


def shrink_sizes(sizes: np.ndarray) -> np.ndarray:
    """Height and width that pictures of these sizes have for training, int64 `[n, 2]`."""
    large = sizes.min(1) > TRAINING_SIDE
    kept = sizes.copy()
    for row in large.nonzero()[0]:
        kept[row] = fit_shorter_side((int(sizes[row, 0]), int(sizes[row, 1])), TRAINING_SIDE)
    return kept


def write_images(rows: Rows, chosen: np.ndarray, file: Path, side: int | None, sizes: np.ndarray) -> None:
    """Decode the chosen rows into one file, in their order.

    Args:
        chosen: ascending rows, at least one.
        side: pixels of a centered square's side; None keeps whole pictures, of the given `sizes`.
        sizes: int64 `[n, 2]`, heights and widths that are written.

    Raises:
        InputError: an image, which the message names, cannot be decoded.
    """
    ends = np.cumsum(3 * sizes.prod(1))
    position = {int(row): n for n, row in enumerate(chosen)}
    wanted = [c for c, span in enumerate(rows.chunks) if any(row in position for row in span)]
    out = np.memmap(file, np.uint8, "w+", shape=int(ends[-1]))

    def work(span: range, images: list[bytes]) -> None:
        for row, encoded in zip(span, images, strict=True):
            if (at := position.get(row)) is None:
                continue
            height, width = map(int, sizes[at])
            try:
                image = decode(encoded)
            except OSError as error:
                raise InputError(
                    f"{rows.name(row)} cannot be decoded ({error}): stage=check_data lists all such images"
                ) from None
            pixels = _crop_center(image, side) if side else _resize_pixels(image, height, width)
            out[ends[at] - pixels.size : ends[at]] = pixels.reshape(-1)

    for _ in map_chunks(rows, work, wanted):
        pass
    out.flush()


def map_file(file: Path) -> Tensor:
    """Map a file into memory as uint8 `[bytes]`."""
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)


class Packed(NamedTuple):
    """Pictures of several sizes, one after the other.

    pixels: uint8 `[bytes]`, picture after picture, each `[3, H, W]`. sizes: int64 `[n, 2]`, heights and widths,
    as an array of numpy: they stay on the host when a batch moves to a device. height, width: the largest of
    them.
    """

    pixels: Tensor
    sizes: np.ndarray
    height: int
    width: int

    def pad(self) -> Tensor:
        """Copy into one tensor, uint8 `[n, 3, height, width]`, on the pixels' device. What lies beyond a
        picture's own size is undefined.
        """
        pixels, sizes = self.pixels, torch.from_numpy(self.sizes).to(self.pixels.device)
        shape = (len(sizes), 3, self.height, self.width)
        if len(pixels) == torch.Size(shape).numel():
            return pixels.view(shape)
        area, width = sizes.prod(1), sizes[:, 1]
        planes = (3 * area).cumsum(0)[:, None] - area[:, None] * torch.arange(3, 0, -1, device=pixels.device)
        rows = planes[:, :, None] + torch.arange(self.height, device=pixels.device) * width[:, None, None]
        if len(pixels) < 1 << 30:
            rows = rows.int()  # half the memory, most of which positions take
        positions = rows[..., None] + torch.arange(self.width, device=pixels.device, dtype=rows.dtype)
        return pixels.index_select(0, positions.view(-1).clamp_(max=len(pixels) - 1)).view(shape)

    def cut_windows(self, boxes: Tensor, side: int, flips: Tensor | None = None) -> Tensor:
        """Resize windows to squares: float32 `[n, 3, side, side]` in [0, 255], on the pixels' device.

        With Triton's kernels on a GPU this takes a sixth of the time, and rounds differently.

        Args:
            boxes, flips: see `crops.resize`; on the CPU.
        """
        kernels = (
            load_kernels(f"{__package__}.gpu_crops", "torch crops pictures") if self.pixels.is_cuda else None
        )
        if kernels is None:
            return resize(self.pad(), boxes, side, flips)
        return kernels.resize_packed(self.pixels, torch.from_numpy(self.sizes), boxes, side, flips)


class Pictures:
    """Pictures of many sizes in one run of bytes.

    Indexing returns what evaluation sees: centered squares, uint8 `[n, 3, side, side]`.

    Args:
        data: uint8 `[bytes]`, picture after picture, each `[3, H, W]`.
        sizes: int64 `[N, 2]`, heights and widths.
        side: of the squares.
    """

    dtype = torch.uint8

    def __init__(self, data: Tensor, sizes: np.ndarray, side: int) -> None:
        self.data = data
        self.sizes = torch.from_numpy(np.ascontiguousarray(sizes, dtype=np.int64))
        self.side = side
        self._bytes = data.numpy()
        self._shapes = self.sizes.numpy()
        self._starts = np.concatenate([[0], np.cumsum(3 * self._shapes.prod(1))])

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape that indexing all pictures would return."""
        return len(self), 3, self.side, self.side

    def dim(self) -> int:
        return 4

    def pack(self, positions: Tensor) -> Packed:
        """Pictures as they are kept.

        One call of torch copies them all without Python's lock. While a model trains, a thread that takes the
        lock for every picture waits milliseconds each time.
        """
        rows = positions.numpy()
        spans = zip(self._starts[rows].tolist(), self._starts[rows + 1].tolist(), strict=True)
        pixels = torch.cat([torch.from_numpy(self._bytes[start:end]) for start, end in spans])
        sizes = self._shapes[rows]
        height, width = sizes.max(0).tolist()
        return Packed(pixels, sizes, height, width)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        positions = torch.arange(len(self))[index]
        out = [torch.empty(0, 3, self.side, self.side)]
        for some in positions.split(256) if len(positions) else ():
            packed = self.pack(some)
            out.append(packed.cut_windows(center_boxes(torch.from_numpy(packed.sizes)), self.side))
        return torch.cat(out).round().to(torch.uint8)
