"""Augmentation of whole batches, and normalisation."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.core import keys
from fedlens.data.augment import Augment
from fedlens.network.ops import normalise


def batch(num_clients, size, channels=3, height=8, width=6, dtype=torch.uint8):
    torch.default_generator.manual_seed(0)
    images = torch.randint(1, 256, (num_clients, size, channels, height, width))
    return images.to(dtype), keys.fold(keys.root(1), torch.arange(num_clients))


def candidates(image, crop, flip):
    """Every result that augmenting one image may have."""
    height, width = image.shape[-2:]
    for mirrored in [image, image.flip(-1)][: 1 + flip]:
        padded = F.pad(mirrored, (crop,) * 4)
        for y in range(2 * crop + 1):
            for x in range(2 * crop + 1):
                yield padded[:, y : y + height, x : x + width]


@pytest.mark.parametrize(("crop", "flip"), [(0, True), (2, False), (2, True)])
def test_each_image_becomes_one_of_its_crops_and_all_of_them_occur(crop, flip):
    images, client_keys = batch(1, 1)
    images = images.expand(1, 600, -1, -1, -1)
    out = Augment(crop, flip)(images, client_keys)[0]
    possible = torch.stack(list(candidates(images[0, 0], crop, flip)))
    matches = (out[:, None] == possible[None]).flatten(2).all(2)
    assert (matches.sum(1) == 1).all()
    share = matches.double().mean(0)
    assert ((share - 1 / len(possible)).abs() < 5 / (600 * len(possible)) ** 0.5).all()


def test_nothing_to_do_leaves_the_images_alone():
    images, client_keys = batch(2, 3)
    assert Augment()(images, client_keys) is images


@settings(deadline=None)
@given(st.integers(0, 3), st.booleans(), st.permutations(range(4)), st.integers(1, 4))
def test_a_client_is_augmented_the_same_whoever_stands_beside_it(crop, flip, order, num):
    images, client_keys = batch(4, 5)
    augment = Augment(crop, flip)
    some = torch.tensor(order[:num])
    everyone = augment(images, client_keys)
    assert torch.equal(augment(images[some], client_keys[some]), everyone[some])


def test_rows_and_steps_are_augmented_differently_but_a_longer_batch_changes_no_row():
    images, client_keys = batch(2, 40)
    images = images[:1, :1].expand(2, 40, -1, -1, -1).contiguous()
    out = Augment(3, True)(images, client_keys)
    assert not torch.equal(out[0], out[1])
    assert len(out[0].flatten(1).unique(dim=0)) > 20
    assert torch.equal(Augment(3, True)(images[:, :7], client_keys), out[:, :7])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_dtype_and_memory_format_change_the_result_in_nothing(dtype):
    images, client_keys = batch(2, 5, dtype=dtype)
    last = images.movedim(2, -1).contiguous().movedim(-1, 2)
    augment = Augment(2, True)
    out, out_last = augment(images, client_keys), augment(last, client_keys)
    assert out.dtype == out_last.dtype == dtype
    assert torch.equal(out, out_last)
    assert torch.equal(out, augment(batch(2, 5)[0], client_keys).to(dtype))
    assert out.is_contiguous()
    assert out_last.movedim(2, -1).is_contiguous()


def test_images_that_are_a_view_with_gaps_are_augmented_too():
    images, client_keys = batch(4, 6)
    some = images[::2, ::3]
    assert torch.equal(
        Augment(1, True)(some, client_keys[::2]), Augment(1, True)(some.clone(), client_keys[::2])
    )


@pytest.mark.parametrize("wrong", [{"crop": -1}, {"resized": 1.5}, {"aspect": 0.5}])
def test_a_wrong_number_is_refused_by_its_key(wrong):
    ((key, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"augment\.{key} is {value}: choose"):
        Augment(**wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bytes_are_scaled_and_standardised_by_channel(dtype):
    images, _ = batch(2, 3)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    m, s = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (mean, std))
    expected = (images.double() / 255 - m) / s
    out = normalise(images, mean, std, dtype)
    assert out.dtype == dtype
    # Terms of up to 5, rounded a few times.
    assert (out.double() - expected).abs().max() < 8 * torch.finfo(dtype).eps


def test_without_mean_and_std_bytes_become_0_to_1():
    images = torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1, 1)
    assert normalise(images, None, None, torch.float32).flatten().tolist() == [0, 1]


def test_floats_are_only_cast():
    images, _ = batch(1, 2, dtype=torch.float64)
    out = normalise(images, (0.5,) * 3, (0.2,) * 3, torch.float32)
    assert torch.equal(out, images.float())


def test_normalising_keeps_channels_last_and_the_images_themselves():
    images, _ = batch(2, 3)
    last = images.movedim(2, -1).contiguous().movedim(-1, 2)
    before = last.clone()
    out = normalise(last, None, None, torch.float32)
    assert out.stride() == last.stride()
    assert torch.equal(last, before)
    four = images[0].to(memory_format=torch.channels_last)
    out = normalise(four, None, None, torch.bfloat16)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_a_mean_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="means"):
        normalise(batch(1, 1)[0], (0.5,), None, torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_images_are_augmented_the_same_on_a_gpu():
    images, client_keys = batch(3, 5)
    out = Augment(2, True)(images.cuda(), client_keys.cuda())
    assert torch.equal(out.cpu(), Augment(2, True)(images, client_keys))


def test_a_resized_crop_of_the_whole_image_is_the_image():
    images, client_keys = batch(2, 3)
    assert torch.equal(Augment(resized=1.0, aspect=1.0)(images, client_keys), images)


def test_a_resized_crop_of_a_ramp_is_a_part_of_it_stretched():
    """On an image whose pixels are their own x, the slope is the share of the width kept."""
    ramp = torch.arange(64, dtype=torch.float64).expand(1, 200, 1, 64, 64)
    client_keys = keys.fold(keys.root(1), torch.arange(1))
    out = Augment(resized=0.25, aspect=1.0)(ramp, client_keys)[0, :, 0]
    slopes = (out[:, 32, 40] - out[:, 32, 24]) / 16
    assert float(slopes.min()) >= 0.5 - 1e-6 and float(slopes.max()) <= 1 + 1e-6
    area = slopes.square()  # uniform between 0.25 and 1
    assert abs(float(area.mean()) - 0.625) < 5 * 0.2165 / 200**0.5
    assert float(out.min()) >= 0 and float(out.max()) <= 63


@pytest.mark.parametrize("least", [0.08, 0.9, 1.0])
def test_a_resized_crop_has_the_area_and_the_shape_that_it_may_have(least):
    """Areas are spread evenly (Szegedy et al., 2015), also where few shapes still fit."""
    count, side = 4000, 8
    ramp = torch.arange(side, dtype=torch.float64)
    images = torch.stack([ramp.expand(side, side), ramp[:, None].expand(side, side)])
    client_keys = keys.fold(keys.root(1), torch.arange(1))
    out = Augment(resized=least)(images.expand(1, count, 2, side, side), client_keys)[0]
    wide = out[:, 0, 4, 5] - out[:, 0, 4, 4]  # one pixel on, in pixels of the image
    tall = out[:, 1, 5, 4] - out[:, 1, 4, 4]
    area, shape = wide * tall, wide / tall
    assert float(area.min()) >= least - 1e-6 and float(area.max()) <= 1 + 1e-6
    assert float(shape.min()) >= 3 / 4 - 1e-6 and float(shape.max()) <= 4 / 3 + 1e-6
    spread = (1 - least) / 12**0.5
    assert abs(float(area.mean()) - (1 + least) / 2) <= 5 * spread / count**0.5 + 1e-6
    assert abs(float(shape.log().mean())) < 0.02


@settings(deadline=None, max_examples=20)
@given(st.floats(0.05, 1), st.floats(1, 2), st.permutations(range(4)))
def test_a_client_is_resized_the_same_whoever_stands_beside_it(resized, aspect, order):
    images, client_keys = batch(4, 5)
    augment = Augment(crop=1, flip=True, resized=resized, aspect=aspect)
    some = torch.tensor(order[:2])
    everyone = augment(images, client_keys)
    assert everyone.dtype is torch.uint8 and everyone.shape == images.shape
    assert torch.equal(augment(images[some], client_keys[some]), everyone[some])


@pytest.mark.parametrize("wrong", [{"resized": -0.1}, {"resized": 1.5}, {"aspect": 0.5}])
def test_impossible_resized_crops_are_refused(wrong):
    with pytest.raises(ValueError, match="choose"):
        Augment(**wrong)
