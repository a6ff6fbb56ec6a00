"""The contract every task keeps: parts, caching, fingerprints, and messages for wrong data."""

from dataclasses import dataclass

import pytest
import torch

from mergekit_lab.errors import InputError
from mergekit_lab.tasks import ImageSamples, ImageTask, Part, count_shared_images, digest_images


@dataclass(frozen=True)
class Brightness(ImageTask):
    """Dark or light; `leak` puts one training image into the test part, `shift` moves the labels."""

    name: str = "brightness"
    leak: bool = False
    shift: int = 0
    size: int = 6

    classes = ("dark", "light")
    templates = ("a {} picture",)

    def make(self, part: Part) -> ImageSamples:
        start = {"train": 0, "validation": 80, "test": 160}[part]
        levels = torch.arange(start, start + self.size)
        if self.leak and part == "test":
            levels[0] = 0
        images = levels.to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 3, 4, 4)
        return ImageSamples(images, torch.arange(self.size) % 2 + self.shift)


def test_a_part_is_built_once_for_equal_tasks():
    assert Brightness().load_samples("train") is Brightness().load_samples("train")
    assert Brightness().load_samples("train") is not Brightness(size=4).load_samples("train")


def test_an_unknown_part_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"'tests'.*'test'"):
        Brightness().load_samples("tests")  # type: ignore[arg-type]


def test_labels_beyond_the_class_names_are_refused():
    with pytest.raises(InputError, match=r"names 2 classes,.*'train' span 1 … 2"):
        Brightness(shift=1).load_samples("train")


def test_an_empty_part_is_refused():
    with pytest.raises(InputError, match="empty part 'test'"):
        Brightness(size=0).load_samples("test")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), "images must be uint8"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), "images must be uint8"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "labels must be int64"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2), "labels must be int64"),
    ],
)
def test_a_split_refuses_wrong_types_and_shapes(images, labels, message):
    with pytest.raises(InputError, match=message):
        ImageSamples(images, labels)


def test_the_fingerprint_follows_the_content_and_not_the_object():
    assert Brightness().fingerprint() == Brightness().fingerprint()
    others = [Brightness(leak=True), Brightness(size=4), Brightness(name="light")]
    assert len({task.fingerprint() for task in [Brightness(), *others]}) == 4


def test_shared_images_counts_a_planted_leak():
    assert set(count_shared_images(Brightness()).values()) == {0}
    leaks = count_shared_images(Brightness(leak=True))
    assert leaks == {("train", "validation"): 0, ("train", "test"): 1, ("validation", "test"): 0}


def test_digests_differ_by_one_gray_level_in_one_pixel():
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    images[1, 2, 3, 3] = 1
    first, second = digest_images(images)
    assert first != second
