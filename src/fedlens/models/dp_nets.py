"""Small nets of work on differential privacy, in which noise grows with the number of weights."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import nn

from fedlens.models.geometry import num_features


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
    net = _net("tanh-vgg", shape, layers, 128, nn.Tanh, num_classes)
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
    return _net(name, shape, features, 32, activation, num_classes)


def _net(
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
