"""Windows are torchvision's, resizing is Pillow's, and both are functions of the seed."""

import importlib
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mergekit_lab.tasks import Packed
from mergekit_lab.tasks.crops import center_boxes, draw_boxes, resize


@pytest.mark.parametrize(("height", "width"), [(256, 341), (300, 224), (40, 28), (224, 224)])
def test_a_window_is_resized_as_pillow_does_it(height: int, width: int) -> None:
    pixels = torch.randint(
        0, 256, (1, 3, height + 5, width + 9), generator=torch.Generator().manual_seed(0)
    ).byte()
    ours = resize(pixels, torch.tensor([[3, 7, height, width]]), 224)[0]
    image = Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).crop((7, 3, 7 + width, 3 + height))
    theirs = np.asarray(image.resize((224, 224), Image.BICUBIC)).transpose(2, 0, 1).astype(float)
    assert np.abs(ours.numpy() - theirs).max() < 1.6  # Pillow rounds between its two passes


def test_what_lies_beyond_a_window_does_not_enter_it() -> None:
    pixels = torch.full((1, 3, 60, 60), 255, dtype=torch.uint8)
    pixels[:, :, 10:40, 20:50] = 7
    assert (resize(pixels, torch.tensor([[10, 20, 30, 30]]), 16) - 7).abs().max() < 1e-4


def test_flipping_mirrors_the_chosen_ones() -> None:
    pixels = torch.randint(0, 256, (2, 3, 20, 30), dtype=torch.uint8)
    boxes = torch.tensor([[0, 0, 20, 30]] * 2)
    plain, turned = resize(pixels, boxes, 8), resize(pixels, boxes, 8, torch.tensor([False, True]))
    torch.testing.assert_close(turned[0], plain[0])
    torch.testing.assert_close(turned[1], plain[1].flip(2))


def test_windows_lie_inside_and_have_the_shares_and_shapes_asked_for() -> None:
    sizes = torch.tensor([[256, 341], [300, 256], [32, 32]]).repeat(200, 1)
    boxes = draw_boxes(sizes, torch.Generator().manual_seed(0), (0.9, 1.0)).double()
    top, left, height, width = boxes.unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= sizes[:, 0]).all()
    assert (left + width <= sizes[:, 1]).all()
    share = height * width / sizes.prod(1)
    assert share.min() > 0.85
    assert share.max() <= 1.0
    assert share.std() > 0.02
    assert boxes[:, :2].unique(dim=0).shape[0] > 100


def test_a_picture_in_which_no_window_fits_gets_the_largest_in_its_middle() -> None:
    box = draw_boxes(torch.tensor([[10, 400]]), torch.Generator().manual_seed(0), (0.9, 1.0))
    assert box.tolist() == [[0, 193, 10, 13]]


def test_windows_are_a_function_of_the_seed() -> None:
    sizes = torch.tensor([[256, 341]] * 5)
    draws = [draw_boxes(sizes, torch.Generator().manual_seed(seed), (0.9, 1.0)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_the_middle_is_the_largest_square() -> None:
    assert center_boxes(torch.tensor([[10, 20], [9, 4]])).tolist() == [[0, 5, 10, 10], [2, 0, 4, 4]]


def test_a_gpu_s_kernels_make_of_packed_pictures_what_torch_makes_of_padded_ones(monkeypatch) -> None:
    """By Triton's interpreter; where the two round a half otherwise between their passes, a level differs."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "mergekit_lab.tasks.gpu_crops", raising=False)
    kernels = importlib.import_module("mergekit_lab.tasks.gpu_crops")
    sys.modules.pop("mergekit_lab.tasks.gpu_crops")
    generator = torch.Generator().manual_seed(0)
    sizes = np.array([[10, 15], [16, 6], [6, 6]])
    pixels = torch.randint(0, 256, (3 * int(sizes.prod(1).sum()),), generator=generator, dtype=torch.uint8)
    packed = Packed(pixels, sizes, 16, 15)
    boxes = draw_boxes(torch.from_numpy(sizes), generator, (0.5, 1.0))
    flips = torch.tensor([False, True, True])
    ours = kernels.resize_packed(pixels, torch.from_numpy(sizes), boxes, 4, flips)
    apart = (ours - packed.cut_windows(boxes, 4, flips)).abs()
    assert apart.max() < 1
    assert apart.mean() < 1e-2
