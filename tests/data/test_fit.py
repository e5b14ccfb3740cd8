"""How rectangular photos get the size of a model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

import fedlens as fl
from fedlens.config.options import options_of, resolve
from fedlens.data import DATASETS, Source
from fedlens.data.pictures import Form, pixels_of, read
from fedlens.deploy.resizing import resized

BARS = ((255, 0, 0), (0, 255, 0), (0, 0, 255))


def write_photo(path: Path, width: int = 300, height: int = 400, turned: int = 1) -> Path:
    """A white disc on three bars of colour, from the left to the right of the stored file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    photo = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(photo)
    for i, colour in enumerate(BARS):
        draw.rectangle((i * width // 3, 0, (i + 1) * width // 3, height), colour)
    draw.ellipse((width / 2 - 60, height / 2 - 60, width / 2 + 60, height / 2 + 60), "white")
    exif = photo.getexif()
    exif[0x0112] = turned
    photo.save(path, quality=95, exif=exif)
    return path


def disc(pixels: np.ndarray) -> tuple[int, int]:
    """The width and height of what is white."""
    white = (pixels > 200).all(axis=2)
    return int(white.max(axis=0).sum()), int(white.max(axis=1).sum())


def test_stretched_photos_are_distorted_and_whole(tmp_path):
    pixels = read(write_photo(tmp_path / "a.jpg"), Form(60, 3))
    width, height = disc(pixels)
    assert width == pytest.approx(24, abs=2) and height == pytest.approx(18, abs=2)
    for column, colour in zip((5, 30, 55), BARS, strict=True):
        assert np.abs(pixels[3, column] - np.array(colour)).max() < 30


@pytest.mark.parametrize("turned", [1, 6])
def test_letterboxed_photos_are_whole_and_round_between_black_bars(tmp_path, turned):
    pixels = read(write_photo(tmp_path / "a.jpg", turned=turned), Form(60, 3, "letterbox"))
    width, height = disc(pixels)
    assert width == pytest.approx(18, abs=2) and height == pytest.approx(18, abs=2)
    upright = pixels if turned == 1 else pixels.transpose(1, 0, 2)  # 6: a photo that is lying
    black = upright.max(axis=(0, 2)) < 10
    assert black[:7].all() and black[-7:].all() and not black[8:52].any()


def test_cropped_photos_are_their_middle_and_round(tmp_path):
    pixels = read(write_photo(tmp_path / "a.jpg", 600, 200), Form(60, 3, "crop"))
    width, height = disc(pixels)
    assert width == pytest.approx(36, abs=2) and height == pytest.approx(36, abs=2)
    assert (np.abs(pixels[3] - np.array(BARS[1])).max(1) < 60).all()  # the other bars are cut off


def test_the_key_is_of_all_own_images(tmp_path):
    for i in range(4):
        write_photo(tmp_path / "photos" / ("a", "b")[i % 2] / f"{i}.jpg")
    function, options = DATASETS["folder"], {"path": "photos", "size": 60, "fit": "letterbox"}
    made = function(Source(base=tmp_path), **resolve(options_of(function), options, "folder"))
    assert made.fit == "letterbox" and int(made.train.images[..., :7].max()) < 10
    with pytest.raises(ValueError, match=r"fit.*letterbox"):
        fl.Experiment(
            dataset={"name": "folder", **options, "fit": "letter"}, model="linear", rounds=1
        )


def test_data_sets_of_torchvisions_kind_fit_alike(tmp_path):
    photo = Image.open(write_photo(tmp_path / "a.jpg"))
    made = fl.map_style([(photo, 0), (photo, 1)] * 2, size=60, fit="letterbox", test_share=0.5)
    assert made.fit == "letterbox" and int(made.train.images[..., :7].max()) < 10


@given(
    st.sampled_from(("stretch", "crop", "letterbox")),
    *[st.tuples(st.integers(1, 60), st.integers(1, 60))] * 2,
)
def test_tensors_are_resized_as_files_are(fit, given, wanted):
    drawn = np.random.default_rng(0).integers(0, 256, (*given, 3), dtype=np.uint8)
    pillow = pixels_of(Image.fromarray(drawn), Form(wanted, 3, fit))
    images = torch.from_numpy(drawn).permute(2, 0, 1)[None].float()
    found = resized(images, wanted, fit).round().clamp(0, 255)[0].permute(1, 2, 0).numpy()
    assert np.abs(pillow.astype(int) - found).max() <= 1
