"""The models that others publish weights for: torchvision's names, shapes and initialisation."""

import pytest
import torch
from torch import nn

from fedlens.models import MODELS
from fedlens.network.pool import AdaptivePool

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def build(name, shape=(3, 224, 224), num_classes=1000, **options):
    return MODELS[name](shape, num_classes, **options)


def linear(*names):
    return [f"{name}.{part}" for name in names for part in ("weight", "bias")]


def normalised(convolution, norm):
    parts = ("weight", "bias", *STATISTICS)
    return [f"{convolution}.weight", *(f"{norm}.{part}" for part in parts)]


def resnet18_names():
    names = normalised("conv1", "bn1")
    for layer in range(1, 5):
        for block in range(2):
            at = f"layer{layer}.{block}"
            names += normalised(f"{at}.conv1", f"{at}.bn1")
            names += normalised(f"{at}.conv2", f"{at}.bn2")
            if layer > 1 and block == 0:
                names += normalised(f"{at}.downsample.0", f"{at}.downsample.1")
    return names + linear("fc")


def mobilenetv2_names():
    names = normalised("features.0.0", "features.0.1")
    names += normalised("features.1.conv.0.0", "features.1.conv.0.1")
    names += normalised("features.1.conv.1", "features.1.conv.2")
    for block in range(2, 18):
        at = f"features.{block}.conv"
        for place in (0, 1):
            names += normalised(f"{at}.{place}.0", f"{at}.{place}.1")
        names += normalised(f"{at}.2", f"{at}.3")
    return names + normalised("features.18.0", "features.18.1") + linear("classifier.1")


PUBLISHED: dict[str, tuple[int, list[str], dict[str, tuple[int, ...]]]] = {
    "alexnet": (
        61_100_840,
        linear(*(f"features.{n}" for n in (0, 3, 6, 8, 10)))
        + linear(*(f"classifier.{n}" for n in (1, 4, 6))),
        {"features.0.weight": (64, 3, 11, 11), "classifier.1.weight": (4096, 9216)},
    ),
    "mobilenetv2": (
        3_504_872,
        mobilenetv2_names(),
        {"features.1.conv.0.0.weight": (32, 1, 3, 3), "features.18.0.weight": (1280, 320, 1, 1)},
    ),
    "resnet18": (
        11_689_512,
        resnet18_names(),
        {"conv1.weight": (64, 3, 7, 7), "layer2.0.downsample.0.weight": (128, 64, 1, 1)},
    ),
    "vgg11": (
        132_863_336,
        linear(*(f"features.{n}" for n in (0, 3, 6, 8, 11, 13, 16, 18)))
        + linear(*(f"classifier.{n}" for n in (0, 3, 6))),
        {"features.18.weight": (512, 512, 3, 3), "classifier.0.weight": (4096, 25_088)},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_shapes_and_counts_are_torchvisions(name):
    count, names, shapes = PUBLISHED[name]
    with torch.device("meta"):
        model = build(name)
    state = model.state_dict()
    assert list(state) == names
    assert {key: tuple(state[key].shape) for key in shapes} == shapes
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(
    ("stem", "side", "last"),
    [("imagenet", 224, 7), ("cifar", 32, 4), ("tiny", 64, 4), ("imagenet", 32, 1)],
)
def test_the_stem_decides_the_size_of_the_last_map(stem, side, last):
    with torch.device("meta"):
        model = build("resnet18", stem=stem)
        sides = []
        model.layer4.register_forward_hook(lambda _m, _x, out: sides.append(out.shape[-2:]))
        model(torch.zeros(2, 3, side, side))
    assert sides == [(last, last)]


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_group_norm_leaves_four_channels_a_group(name):
    with torch.device("meta"):
        model = build(name, norm="group")
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    groups = {m.num_channels: m.num_groups for m in norms}
    expected = {64: 16, 128: 32, 256: 32, 512: 32}
    if name == "mobilenetv2":
        expected = {16: 4, 24: 6, 32: 8, 64: 16, 96: 24, 144: 24, 160: 32, 192: 32, 320: 32}
        expected |= {384: 32, 576: 32, 960: 32, 1280: 32}
    assert groups == expected


def test_weights_start_as_torchvisions_do():
    torch.default_generator.manual_seed(0)
    resnet, mobile = build("resnet18", num_classes=10), build("mobilenetv2", num_classes=10)
    vgg = build("vgg11", (3, 32, 32), 10, pool=1)
    fan_out = {
        resnet.layer3[0].conv1.weight: 256 * 9,
        mobile.features[18][0].weight: 1280,
        vgg.features[18].weight: 512 * 9,
    }
    for weight, fan in fan_out.items():
        assert weight.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.02)
    for layer in (mobile.classifier[1], vgg.classifier[3]):
        assert layer.weight.std().item() == pytest.approx(0.01, rel=0.05)
        assert not layer.bias.any()
    assert not vgg.features[0].bias.any()
    assert bool((resnet.bn1.weight == 1).all()) and not resnet.bn1.bias.any()


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (7, 7), (9, 20), (14, 14)])
@pytest.mark.parametrize("side", [1, 6, 7])
def test_the_pool_is_pytorchs(size, side):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = nn.AdaptiveAvgPool2d(side)(x)
    torch.testing.assert_close(AdaptivePool(side)(x), expected, rtol=0, atol=1e-12)


def test_the_bottleneck_is_two_linear_layers_without_anything_between_them():
    model = build("mobilenetv2", (3, 32, 32), 2028, bottleneck=64)
    shapes = [tuple(m.weight.shape) for m in model.classifier if isinstance(m, nn.Linear)]
    assert shapes == [(64, 1280), (2028, 64)]
    with pytest.raises(ValueError, match="bottleneck"):
        build("mobilenetv2", bottleneck=-1)
