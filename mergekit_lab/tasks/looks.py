"""How a rendered task looks: from clean bitmaps to distorted, colored images.

Every task has its own look: colors, polarity, grain, blur, an object in front. So tasks differ in more than
their labels, as photographs of road signs differ from satellite pictures.
"""

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, max_pool2d

from .glyphs import CANVAS

SIZE = 32
Color = tuple[float, float, float]


@dataclass(frozen=True)
class GlyphLook:
    """Ranges that one image's distortion is drawn from, uniformly.

    ink, paper: two RGB colors each, in [0, 1]; a color is drawn between them, channel by channel.
    rotation: degrees either way. scale: size factors, from and to. shear: horizontal slope either way.
    shift: pixels either way. blur: share of the image mixed with its 3×3 mean, twice, up to this value.
    noise: standard deviation of grain, up to this value. shade: strength of a linear change of light across
    the image. mirror: drawn as seen in a mirror. hollow: only a line around the glyph is drawn. crowd: glyphs
    of the same part stand left and right, cut by the frame. bars: so many bands of paper over the glyph.
    stripes: waves of ink on the paper, up to this share of ink.
    """

    ink: tuple[Color, Color]
    paper: tuple[Color, Color]
    rotation: float = 8.0
    scale: tuple[float, float] = (0.8, 1.1)
    shear: float = 0.08
    shift: float = 2.0
    blur: float = 0.0
    noise: float = 0.05
    shade: float = 0.0
    mirror: bool = False
    hollow: bool = False
    crowd: bool = False
    bars: int = 0
    stripes: float = 0.0


LOOKS: dict[str, GlyphLook] = {
    "shop window": GlyphLook(
        ink=((0.0, 0.0, 0.0), (0.25, 0.25, 0.25)), paper=((0.75, 0.72, 0.65), (0.95, 0.92, 0.85)),
        blur=0.8, noise=0.12, shade=0.2, mirror=True,
    ),
    "blueprint": GlyphLook(
        ink=((0.75, 0.85, 0.9), (1.0, 1.0, 1.0)), paper=((0.05, 0.15, 0.4), (0.15, 0.3, 0.65)),
        rotation=15.0, noise=0.05, bars=1, hollow=True,
    ),
    "poster": GlyphLook(
        ink=((0.8, 0.75, 0.1), (1.0, 0.95, 0.4)), paper=((0.55, 0.02, 0.02), (0.8, 0.15, 0.12)),
        noise=0.08, shade=0.4, stripes=0.5,
    ),
    "chalkboard": GlyphLook(
        ink=((0.7, 0.75, 0.7), (0.95, 1.0, 0.95)), paper=((0.05, 0.2, 0.12), (0.12, 0.35, 0.22)),
        rotation=12.0, scale=(0.6, 1.0), noise=0.2, blur=0.4, crowd=True,
    ),
    "neon": GlyphLook(
        ink=((0.1, 0.8, 0.6), (0.4, 1.0, 1.0)), paper=((0.0, 0.0, 0.0), (0.12, 0.05, 0.15)),
        rotation=4.0, scale=(0.95, 1.15), blur=0.6, noise=0.03, crowd=True,
    ),
    "fabric": GlyphLook(
        ink=((0.3, 0.0, 0.35), (0.55, 0.2, 0.6)), paper=((0.75, 0.8, 0.9), (0.95, 0.95, 1.0)),
        rotation=3.0, shear=0.0, scale=(0.9, 1.15), noise=0.05, stripes=0.5,
    ),
}  # fmt: skip


def _draw_uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator) * (high - low) + low


def warp(bitmaps: Tensor, look: GlyphLook, generator: torch.Generator, aside: float = 0.0) -> Tensor:
    """Rotate, scale, shear and shift: float `[N, CANVAS, CANVAS]` in [0, 1] to `[N, SIZE, SIZE]`.

    The frame is the middle of the canvas. At scale 1 a pixel stays a pixel. aside: pixels to the right, added
    to the look's shift.
    """
    count = len(bitmaps)
    angle = _draw_uniform(count, -look.rotation, look.rotation, generator) * (pi / 180)
    zoom = (SIZE / CANVAS) / _draw_uniform(count, *look.scale, generator)
    slope = _draw_uniform(count, -look.shear, look.shear, generator)
    shift = 2 / CANVAS * _draw_uniform(2 * count, -look.shift, look.shift, generator).reshape(2, count)
    shift[0] -= 2 / SIZE * aside * zoom
    cos, sin = angle.cos(), angle.sin()
    theta = torch.stack(
        [zoom * cos, zoom * (cos * slope - sin), shift[0], zoom * sin, zoom * (sin * slope + cos), shift[1]], 1
    ).reshape(count, 2, 3)
    grid = affine_grid(theta, [count, 1, SIZE, SIZE], align_corners=False)
    return grid_sample(bitmaps.unsqueeze(1), grid, align_corners=False).squeeze(1)


def _draw_strokes(bitmaps: Tensor, look: GlyphLook, generator: torch.Generator) -> Tensor:
    """The glyph's own ink, `[N, SIZE, SIZE]`: warped, with neighbors, mirrored or hollow as the look says."""
    ink = warp(bitmaps, look, generator)
    if look.crowd:
        for side in (-SIZE * 0.6, SIZE * 0.6):
            others = bitmaps[torch.randperm(len(bitmaps), generator=generator)]
            ink = torch.maximum(ink, warp(others, look, generator, side))
    if look.mirror:
        ink = ink.flip(2)
    if look.hollow:
        ink = max_pool2d(ink.unsqueeze(1), 3, 1, 1).squeeze(1) - ink
    return ink


def _cover(ink: Tensor, look: GlyphLook, generator: torch.Generator) -> Tensor:
    """Bars take ink away in a band of 3 pixels at any slope; stripes add waves of 6 pixels at any slope."""
    count = len(ink)
    ys, xs = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    for _ in range(look.bars):
        angle = _draw_uniform(count, 0, pi, generator)[:, None, None]
        offset = _draw_uniform(count, -9, 9, generator)[:, None, None]
        distance = ((xs - SIZE / 2) * angle.cos() + (ys - SIZE / 2) * angle.sin() - offset).abs()
        ink = ink * (distance > 1.5)
    if look.stripes:
        angle, phase = (_draw_uniform(count, 0, pi * k, generator)[:, None, None] for k in (1, 2))
        wave = torch.sin((xs * angle.cos() + ys * angle.sin()) * (2 * pi / 6) + phase)
        strength = _draw_uniform(count, look.stripes / 2, look.stripes, generator)[:, None, None]
        ink = torch.maximum(ink, strength * (wave + 1) / 2)
    return ink


def draw(bitmaps: Tensor, look: GlyphLook, generator: torch.Generator) -> Tensor:
    """Draw clean bitmaps, uint8 `[N, CANVAS, CANVAS]`, as images in this look, uint8 `[N, 3, SIZE, SIZE]`."""
    count = len(bitmaps)
    ink = _cover(_draw_strokes(bitmaps.float() / 255, look, generator), look, generator)
    if look.blur:
        share = _draw_uniform(count, 0, look.blur, generator)[:, None, None]
        for _ in range(2):
            soft = avg_pool2d(ink.unsqueeze(1), 3, 1, 1).squeeze(1)
            ink = ink + share * (soft - ink)
    colors = []
    for low, high in (look.ink, look.paper):
        start, end = torch.tensor(low), torch.tensor(high)
        colors.append((start + torch.rand(count, 3, generator=generator) * (end - start))[:, :, None, None])
    images = colors[1] + ink.unsqueeze(1) * (colors[0] - colors[1])
    if look.shade:
        angle = _draw_uniform(count, 0, 2 * pi, generator)[:, None, None]
        ramp = torch.linspace(-0.5, 0.5, SIZE)
        light = 1 + look.shade * (ramp[None, None, :] * angle.cos() + ramp[None, :, None] * angle.sin())
        images = images * light.unsqueeze(1)
    grain = _draw_uniform(count, look.noise / 2, look.noise, generator)[:, None, None, None]
    images = images + grain * torch.randn(images.shape, generator=generator)
    return (images * 255).round().clamp(0, 255).to(torch.uint8)
