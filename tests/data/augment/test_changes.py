"""Rotation, colours, cutout and RandAugment of whole batches."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

import fedlens as fl
from fedlens.core import keys
from fedlens.data.augment import Augment
from fedlens.data.augment.changes import (
    OPERATIONS,
    Affine,
    apply,
    blend,
    cut_out,
    gray,
    jitter,
    mean_gray,
    rand_augment,
    rotate,
    warp,
)
from tests.data.augment.test_augment import batch
from tests.toys import toy

CHANGES = [
    {"rotate": 30.0},
    {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4},
    {"rand_augment": 2},
    {"cutout": 3},
    {"crop": 2, "flip": True, "rotate": 10.0, "contrast": 0.2, "rand_augment": 1, "cutout": 2},
]
every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: ", ".join(change))


def row_keys(clients: int = 1, size: int = 1000) -> torch.Tensor:
    return keys.fold(keys.root(3), torch.arange(clients * size)).view(clients, size)


@every_change
def test_an_image_is_changed_the_same_whatever_stands_beside_it(change):
    images, client_keys = batch(4, 5)
    augment = Augment(**change)
    everyone = augment(images, client_keys)
    assert everyone.dtype is torch.uint8 and everyone.shape == images.shape
    some = torch.tensor([2, 0])
    assert torch.equal(augment(images[some], client_keys[some]), everyone[some])
    assert torch.equal(augment(images[:, :3], client_keys), everyone[:, :3])
    last = images.movedim(2, -1).contiguous().movedim(-1, 2)
    assert torch.equal(augment(last, client_keys), everyone)


@every_change
def test_images_of_one_batch_are_changed_differently(change):
    images, client_keys = batch(2, 30)
    images = images[:1, :1].expand(2, 30, -1, -1, -1).contiguous()
    before = images.clone()
    out = Augment(**change)(images, client_keys)
    assert torch.equal(images, before)
    assert len(out.flatten(0, 1).flatten(1).unique(dim=0)) > 15
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_quarter_turn_is_rot90(turns):
    images = batch(2, 3, height=7, width=7)[0].double()
    angle = torch.full((2, 3), turns * math.pi / 2, dtype=torch.float64)
    torch.testing.assert_close(
        warp(images, Affine.rotation(angle)), images.rot90(turns, (-2, -1)), rtol=0, atol=1e-9
    )


def test_angles_lie_between_both_ends():
    """A bright spot right of the centre: the angle can be read off where it goes."""
    images = torch.zeros(1, 1000, 1, 41, 41)
    images[..., 18:23, 36:41] = 1.0
    out = rotate(images, row_keys(), 45.0)[0, :, 0]
    along = torch.arange(41) - 20.0
    x, y = (out * along).sum((-2, -1)), -(out * along[:, None]).sum((-2, -1))
    degrees = torch.atan2(y, x).rad2deg()
    assert degrees.abs().max() < 47
    assert degrees.min() < -40 and degrees.max() > 40 and degrees.mean().abs() < 4


def test_factors_lie_between_both_ends():
    images = torch.full((1, 1000, 3, 2, 2), 100, dtype=torch.uint8)
    out = jitter(images, row_keys(), 0.4, 0.0, 0.0)[0, :, 0, 0, 0].double()
    assert out.min() >= 60 and out.max() <= 140
    assert out.min() < 65 and out.max() > 135 and abs(out.mean() - 100) < 3


def picture(channels: int = 3) -> torch.Tensor:  # [1, 1, channels, 24, 20] of floats in 0..255
    rng = torch.Generator().manual_seed(0)
    rough = torch.rand(1, channels, 6, 5, generator=rng)
    smooth = torch.nn.functional.interpolate(rough, (24, 20), mode="bilinear")
    return (30 + 200 * smooth).round()[None]


def in_pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image[0, 0].movedim(0, -1).byte().numpy())


def close_to(found: torch.Tensor, expected: Image.Image, levels: float) -> None:
    """Pillow cuts off what is beyond whole numbers, now and again."""
    theirs = torch.from_numpy(np.asarray(expected).copy()).movedim(-1, 0).double()
    assert (found[0, 0].double() - theirs).abs().max() <= levels


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.7])
def test_colours_are_pillows(factor):
    x = picture()
    share = torch.full((1, 1), factor)
    for towards, enhance in (
        (torch.zeros_like(x), ImageEnhance.Brightness),
        (gray(x), ImageEnhance.Color),
        (mean_gray(x), ImageEnhance.Contrast),
    ):
        close_to(blend(towards, x, share, True), enhance(in_pillow(x)).enhance(factor), 2)


def one(name: str, x: torch.Tensor, strength: float, sign: float = 1.0) -> torch.Tensor:
    drawn = torch.full(x.shape[:2], OPERATIONS.index(name))
    return apply(x, drawn, torch.full(x.shape[:2], sign, dtype=torch.float64), strength)


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_operations_of_randaugment_are_pillows(strength):
    x = picture()
    image, factor = in_pillow(x), 1 + 0.9 * strength
    enhance = {"brightness": ImageEnhance.Brightness, "color": ImageEnhance.Color}
    enhance |= {"contrast": ImageEnhance.Contrast, "sharpness": ImageEnhance.Sharpness}
    for name, kind in enhance.items():
        close_to(one(name, x, strength), kind(image).enhance(factor), 2)
    bits = {0.0: 8, 0.3: 7, 1.0: 4}[strength]
    close_to(one("posterize", x, strength), ImageOps.posterize(image, bits), 0)
    close_to(one("solarize", x, strength), ImageOps.solarize(image, 255 * (1 - strength)), 0)
    close_to(one("autocontrast", x, strength), ImageOps.autocontrast(image), 1)
    assert torch.equal(one("identity", x, strength), x)


def test_equalizing_is_pillows():
    rng = torch.Generator().manual_seed(0)
    x = (255 * torch.rand(1, 1, 3, 40, 40, generator=rng) ** 2).round()
    close_to(one("equalize", x, 1.0), ImageOps.equalize(in_pillow(x)), 0)
    flat = torch.full((1, 1, 3, 4, 4), 7.0)
    assert torch.equal(one("equalize", flat, 1.0), flat)
    assert torch.equal(one("autocontrast", flat, 1.0), flat)


@pytest.mark.parametrize(("name", "most"), [("translate x", 150 / 331), ("translate y", 150 / 331)])
def test_a_translation_by_whole_pixels_moves_pixels(name, most):
    x = picture()[..., :20, :]  # 20 x 20
    shift = 4
    moved = one(name, x, shift / (most * 20))
    if name == "translate x":
        assert torch.allclose(moved[..., :-shift], x[..., shift:], atol=1e-3)
        assert moved[..., -shift:].abs().max() < 1e-3
    else:
        assert torch.allclose(moved[..., :-shift, :], x[..., shift:, :], atol=1e-3)


def test_a_shear_leaves_the_first_row_and_moves_the_last_the_most():
    x = picture()
    moved = one("shear x", x, 1.0, sign=-1.0)
    assert torch.allclose(moved[..., 0, :], x[..., 0, :], atol=1e-3)
    last = 0.3 * (x.shape[-2] - 1)  # 6.9 pixels: nothing is left of where row 23 was
    assert moved[..., -1, : int(last)].abs().max() < 1e-3


def test_every_operation_is_drawn():
    x = picture().expand(1, 1000, -1, -1, -1).byte()
    found = rand_augment(x, row_keys(), 1, 20.0)[0].flatten(1).unique(dim=0)
    both_ways, one_way = 9, 5  # of which autocontrast and equalize have no strength
    assert len(found) == 2 * both_ways + one_way


def test_a_square_is_cut_out_around_every_pixel():
    images = torch.ones(1, 2000, 2, 6, 5)
    out = cut_out(images, row_keys(size=2000), 3)[0]
    assert torch.equal(out[:, 0], out[:, 1])
    holes = (out[:, 0] == 0).flatten(1)
    assert holes.sum(1).max() == 9 and holes.sum(1).min() == 4  # a corner
    assert len(holes.unique(dim=0)) == 30  # one for every pixel


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rotate", 181.0),
        ("brightness", -0.1),
        ("contrast", 11.0),
        ("saturation", float("nan")),
        ("rand_augment", -1),
        ("magnitude", 31.0),
        ("cutout", -1),
        ("mixup", -0.2),
    ],
)
def test_a_wrong_number_is_refused_by_its_key(key, value):
    with pytest.raises(ValueError, match=rf"augment\.{key} is {value}: choose"):
        Augment(**{key: value})


def test_randaugment_is_for_bytes():
    described = fl.Experiment(toy(), "linear", rounds=1, augment={"rand_augment": 2})
    with pytest.raises(ValueError, match=r"augment\.rand_augment"):
        fl.run(described)
