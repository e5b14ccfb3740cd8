"""Softmax regression, and small published nets: most have two convolutions and linear layers."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Literal

from torch import nn

from fedlens.models.geometry import num_features
from fedlens.models.initial import initialise


def byzfl_cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The MNIST CNN of ByzFL.

    Gonzalez et al., 2025, arXiv 2505.24802: 20 and 50 channels, no padding, and a layer of 500. On
    1x28x28 with 10 classes: 431,080 parameters.
    """
    return _net("byzfl-cnn", shape, num_classes, (20, 50), (500,), (0, 0))


def fedns_cnn(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    padding: Literal["same", "valid"] = "same",
    relu_on_logits: bool = False,
) -> nn.Module:
    """The Fashion-MNIST CNN of FedNS.

    Zhuo and Li, 2021, arXiv 2101.07995: 32 and 64 channels, layers of 1024 and 256. The paper does
    not state the padding. On 1x28x28 with 10 classes: 3,529,354 parameters with `same`, 1,366,666
    with `valid`. Read literally it puts a ReLU after the last layer, too; that is left out, since
    logits may be negative, unless `relu_on_logits` is true.

    Args:
        padding: whether convolutions keep the size of images (`same`), or cut it (`valid`).
        relu_on_logits: a ReLU after the last layer, as the paper says.
    """
    pad = 2 if padding == "same" else 0
    model = _net("fedns-cnn", shape, num_classes, (32, 64), (1024, 256), (pad, pad))
    if relu_on_logits:
        model.add_module("relu5", nn.ReLU())
    return model


def fedrep_cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The CIFAR CNN of FedRep's scripts.

    Collins et al., ICML 2021, arXiv 2102.07078: 64 channels twice, no padding, layers of 120 and
    64. On 3x32x32 with 10 classes: 307,842 parameters.
    """
    return _net("fedrep-cnn", shape, num_classes, (64, 64), (120, 64), (0, 0))


def hsu_cnn(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    padding: Literal["valid", "same"] = "valid",
) -> nn.Module:
    """The CIFAR CNN of Hsu et al.

    Hsu, Qi and Brown, 2019, arXiv 1909.06335, and 2020, arXiv 2003.08082: 64 channels twice, layers
    of 384 and 192, the net of McMahan et al. and of TensorFlow's tutorial. The papers do not state
    the padding. On 3x32x32 with 10 classes: 797,962 parameters with `valid`, as in public
    implementations on the same splits, and 1,756,426 with `same` (1,068,298 on 24x24 crops).

    Args:
        padding: whether convolutions cut the size of images (`valid`), or keep it (`same`).
    """
    pad = 2 if padding == "same" else 0
    return _net("hsu-cnn", shape, num_classes, (64, 64), (384, 192), (pad, pad))


def lenet5(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pools.

    LeCun et al., Proceedings of the IEEE, 1998, in its usual modern form: 6 and 16 channels and
    layers of 120 and 84, with ReLU and max-pools where the original has tanh, learned average pools
    and a partly connected second convolution. LeNet-5 takes 32x32, so smaller images are padded by
    2 in the first convolution. On 1x28x28 (or 1x32x32) with 10 classes: 61,706 parameters.
    """
    pad = 2 if min(shape[1:]) < 32 else 0
    return _net("lenet5", shape, num_classes, (6, 16), (120, 84), (pad, 0))


def mcmahan_cnn(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    geometry: Literal["same", "paper4", "valid"] = "same",
) -> nn.Module:
    """The MNIST CNN of McMahan et al.

    AISTATS 2017, arXiv 1602.05629: 32 and 64 channels and a layer of 512. On 1x28x28 with 10
    classes: 1,663,370 parameters in the first two geometries. `same` keeps the size in a
    convolution (28, 14, 14, 7); `paper4` is the table in Ghaemi's report on FedAvg, FedProx and
    ADMM, which pads convolutions and pools by 1 (26, 14, 12, 7); `valid` does not pad, as PFLlib's
    CNN (24, 12, 8, 4; 582,026 parameters).

    Args:
        geometry: `paper4` pads convolutions and pools by 1; `same` keeps the size of images;
            `valid` does not pad.
    """
    pad, pool = {"same": (2, 0), "paper4": (1, 1), "valid": (0, 0)}[geometry]
    return _net("mcmahan-cnn", shape, num_classes, (32, 64), (512,), (pad, pad), pool)


def simple_cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The net of PyTorch's CIFAR-10 tutorial.

    NIID-Bench and others call it simple-cnn: 6 and 16 channels, no padding, layers of 120 and 84.
    With 10 classes: 62,006 parameters on 3x32x32, 44,426 on 1x28x28.
    """
    return _net("simple-cnn", shape, num_classes, (6, 16), (120, 84), (0, 0))


def _net(
    name: str,
    shape: tuple[int, int, int],
    num_classes: int,
    channels: tuple[int, int],
    hidden: tuple[int, ...],
    padding: tuple[int, int],
    pool_padding: int = 0,
) -> nn.Sequential:
    """Convolutions of these channels and layers of these widths, each with a ReLU but the last."""
    features: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[0], channels[0], 5, padding=padding[0]),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2, padding=pool_padding),
        "conv2": nn.Conv2d(channels[0], channels[1], 5, padding=padding[1]),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2, padding=pool_padding),
    }
    head: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    widths = num_features(name, features.values(), shape), *hidden, num_classes
    for number, (inputs, outputs) in enumerate(pairwise(widths), 1):
        head[f"fc{number}"] = nn.Linear(inputs, outputs)
        if number <= len(hidden):
            head[f"relu{number + 2}"] = nn.ReLU()
    return nn.Sequential(OrderedDict(features | head))


def linear(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Softmax regression.

    The problem is convex, so the limit that an algorithm should reach is known. With 10 classes:
    7,850 parameters on 1x28x28, 30,730 on 3x32x32.
    """
    channels, height, width = shape
    fc = nn.Linear(channels * height * width, num_classes)
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten(), "fc": fc}
    return nn.Sequential(OrderedDict(layers))


def pfl_cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The CIFAR-10 CNN of pfl-research's benchmarks.

    NeurIPS 2024, arXiv 2404.06430: two 3x3 convolutions of 32 and 64 channels, one 2x2 max-pool, a
    layer of 128, dropout before and after it; Xavier-uniform weights and zero biases. On 3x32x32
    with 10 classes: 1,626,442 parameters.
    """
    features: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[0], 32, 3),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(32, 64, 3),
        "relu2": nn.ReLU(),
        "pool": nn.MaxPool2d(2),
    }
    head: dict[str, nn.Module] = {
        "dropout1": nn.Dropout(0.25),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(num_features("pfl-cnn", features.values(), shape), 128),
        "relu3": nn.ReLU(),
        "dropout2": nn.Dropout(0.5),
        "fc2": nn.Linear(128, num_classes),
    }
    model = nn.Sequential(OrderedDict(features | head))
    initialise(model, "glorot")
    return model


def tanh_vgg(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The CIFAR-10 net of Choquette-Choo et al. for private training.

    ICML 2023, arXiv 2211.06530, after Papernot et al., 2021: three times two 3x3 convolutions, of
    32, 64 and 128 channels, and a 2x2 max-pool, then a layer of 128, with tanh in place of ReLU.
    He-normal convolutions, Glorot-uniform layers, zero biases. On 3x32x32 with 10 classes: 550,570
    parameters.
    """
    layers: list[nn.Module] = []
    for inputs, channels in pairwise((shape[0], 32, 64, 128)):
        for given in (inputs, channels):
            layers += [nn.Conv2d(given, channels, 3, padding=1), nn.Tanh()]
        layers.append(nn.MaxPool2d(2))
    net = _with_features("tanh-vgg", shape, layers, 128, nn.Tanh, num_classes)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return net


def tanh_cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The net of Tramèr and Boneh for MNIST and Fashion-MNIST.

    ICLR 2021, arXiv 2011.11660: convolutions of 16 and 32 channels, of 8x8 and 4x4, with stride 2,
    each with a max-pool of stride 1, and a layer of 32, with tanh. On 1x28x28 with 10 classes:
    26,010 parameters.
    """
    return _strided("tanh-cnn", shape, nn.Tanh, 2, num_classes)


def opacus_cnn(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The net of Opacus' MNIST example.

    As `tanh-cnn`, with ReLU, and a first convolution that is padded by 3 in place of 2. On 1x28x28
    with 10 classes: 26,010 parameters.
    """
    return _strided("opacus-cnn", shape, nn.ReLU, 3, num_classes)


def _strided(
    name: str,
    shape: tuple[int, int, int],
    activation: type[nn.Module],
    padding: int,
    num_classes: int,
) -> nn.Sequential:
    features: list[nn.Module] = []
    for layer in (
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=padding),
        nn.Conv2d(16, 32, 4, stride=2),
    ):
        features += [layer, activation(), nn.MaxPool2d(2, stride=1)]
    return _with_features(name, shape, features, 32, activation, num_classes)


def _with_features(
    name: str,
    shape: tuple[int, int, int],
    features: list[nn.Module],
    hidden: int,
    activation: type[nn.Module],
    num_classes: int,
) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            flatten=nn.Flatten(),
            fc1=nn.Linear(num_features(name, features, shape), hidden),
            activation=activation(),
            fc2=nn.Linear(hidden, num_classes),
        )
    )
