"""No picture stands in two places: not in two parts, not under two labels, not in pre-training."""

import itertools

import pytest

from mergekit_lab.tasks import PARTS, Digits, Mnist, count_shared_images, digest_images, find_held_out
from mergekit_lab.tasks.glyph_tasks import SHIPPED, Accents, Style
from mergekit_lab.tasks.glyphs import digest
from mergekit_lab.tasks.pretraining import list_pretraining_pairs

TASKS = [Digits(), Mnist(), *(task() for task in SHIPPED)]


def digest_pictures(task, part):
    return {digest(*pair) for options in task.list_pairs()[part] for pair in options}


@pytest.mark.parametrize("task", SHIPPED, ids=lambda task: task.__name__)
def test_clean_bitmaps_of_the_parts_are_disjoint(task):
    for one, other in itertools.combinations(PARTS, 2):
        assert not digest_pictures(task, one) & digest_pictures(task, other)


@pytest.mark.parametrize("task", [t for t in SHIPPED if t is not Style], ids=lambda task: task.__name__)
def test_parts_have_font_families_of_their_own(task):
    families = [{face.family for row in task.list_pairs()[part] for face, _ in row} for part in PARTS]
    for one, other in itertools.combinations(families, 2):
        assert not one & other


def test_style_parts_have_characters_of_their_own():
    characters = [{code for row in Style.list_pairs()[part] for _, code in row} for part in PARTS]
    for one, other in itertools.combinations(characters, 2):
        assert not one & other


def test_a_clean_bitmap_has_one_label_over_all_tasks():
    labels = {}
    for task in SHIPPED:
        for part in PARTS:
            for name, options in zip(task.classes, task.list_pairs()[part], strict=True):
                for pair in options:
                    labels.setdefault(digest(*pair), set()).add((task.__name__, name))
    assert [owners for owners in labels.values() if len(owners) > 1] == []


def test_pretraining_sees_no_validation_or_test_bitmap():
    seen = {digest(*pair) for pair in list_pretraining_pairs()}
    assert len(seen) > 30000
    for task in SHIPPED:
        for part in ("validation", "test"):
            assert not seen & digest_pictures(task, part)
            assert digest_pictures(task, part) <= find_held_out()


def test_pretraining_sees_training_bitmaps_so_that_zero_shot_has_a_chance():
    seen = {digest(*pair) for pair in list_pretraining_pairs()}
    assert len(digest_pictures(Accents, "train") & seen) > 0.9 * len(digest_pictures(Accents, "train"))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_parts_share_no_image(task):
    assert set(count_shared_images(task).values()) == {0}


def test_tasks_share_no_image():
    owners: dict[bytes, str] = {}
    for task in TASKS:
        for part in PARTS:
            for image in digest_images(task.load_samples(part).images):
                assert owners.setdefault(image, task.name) == task.name


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_classes_are_balanced_in_every_part(task):
    for part in PARTS:
        counts = task.load_samples(part).labels.bincount(minlength=len(task.classes))
        assert counts.max() - counts.min() <= 1
