"""Clean glyph bitmaps and the looks that are laid over them."""

from dataclasses import replace

import pytest
import torch

from mergekit_lab.errors import InputError
from mergekit_lab.tasks import Greek
from mergekit_lab.tasks.glyphs import CANVAS, FACES, digest, list_characters, select_faces, stack
from mergekit_lab.tasks.looks import LOOKS, SIZE, GlyphLook, draw, warp

PAIRS = [(FACES[0], code) for code in map(ord, "aBg7")]


def test_faces_leave_out_fonts_whose_code_points_do_not_name_what_they_draw():
    files = {face.file for face in FACES}
    assert len(files) == len(FACES) == 21
    assert not files & {"LastResortHE-Regular", "cmex10", "cmmi10", "cmsy10"}
    assert list_characters(select_faces(["typewriter"])[0]) == list_characters(select_faces(["roman"])[0])
    assert ord("<") not in list_characters(select_faces(["roman"])[0])


def test_ink_is_centered_and_inside_the_canvas():
    for bitmap in stack([(face, code) for face in FACES for code in map(ord, "iWgQ")]):
        rows, columns = (bitmap.amax(dim) > 0 for dim in (1, 0))
        for line in (rows, columns):
            positions = line.nonzero()
            first, last = int(positions[0]), CANVAS - 1 - int(positions[-1])
            assert first > 0
            assert abs(first - last) <= 1


def test_a_wide_glyph_is_drawn_smaller_and_not_cut():
    bold, long_arrow = FACES[1], 0x27F7
    assert long_arrow in list_characters(bold)
    columns = stack([(bold, long_arrow)])[0].amax(0) > 0
    assert not columns[0]
    assert not columns[-1]
    assert 30 < int(columns.sum()) <= CANVAS - 4


def test_a_character_without_ink_has_no_digest():
    assert digest(FACES[0], ord(" ")) is None


def test_without_distortion_warping_keeps_the_glyph_upright_and_in_place():
    still = replace(LOOKS["fabric"], rotation=0.0, scale=(1.0, 1.0), shear=0.0, shift=0.0)
    square = torch.zeros(1, CANVAS, CANVAS)
    square[0, 10:15, 20:30] = 1
    warped = warp(square, still, torch.Generator().manual_seed(0))[0]
    ys, xs = (warped > 0.5).nonzero(as_tuple=True)
    margin = (CANVAS - SIZE) // 2
    assert ys.float().mean().item() == pytest.approx(12 - margin, abs=0.1)
    assert xs.float().mean().item() == pytest.approx(24.5 - margin, abs=0.1)


def test_a_neighbor_to_the_right_is_drawn_to_the_right():
    still = replace(LOOKS["fabric"], rotation=0.0, scale=(0.8, 0.8), shear=0.0, shift=0.0)
    square = torch.zeros(1, CANVAS, CANVAS)
    square[0, 18:22, 18:22] = 1
    columns = [
        (warp(square, still, torch.Generator().manual_seed(0), aside)[0] > 0.5).nonzero()[:, 1].float().mean()
        for aside in (0.0, 10.0)
    ]
    assert float(columns[1] - columns[0]) == pytest.approx(10, abs=0.6)


@pytest.mark.parametrize("name", sorted(LOOKS))
def test_a_look_is_a_function_of_the_seed(name):
    images = [draw(stack(PAIRS), LOOKS[name], torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert images[0].shape == (4, 3, SIZE, SIZE)
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


@pytest.mark.parametrize(
    "change",
    [{"mirror": True}, {"hollow": True}, {"crowd": True}, {"stripes": 0.5}, {"bars": 1},
     {"shade": 0.5},
     {"blur": 1.0}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_every_part_of_a_look_changes_the_picture(change):
    plain = GlyphLook(LOOKS["fabric"].ink, LOOKS["fabric"].paper, noise=0.0)
    images = [
        draw(stack(PAIRS), look, torch.Generator().manual_seed(0)) for look in (plain, replace(plain, **change))
    ]
    assert not torch.equal(*images)


def test_an_unknown_look_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"look is 'blueprit'.*'blueprint'"):
        Greek(look="blueprit")
