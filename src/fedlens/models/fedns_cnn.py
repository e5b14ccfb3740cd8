"""The Fashion-MNIST CNN of FedNS (Zhuo and Li, 2021, arXiv 2101.07995).

Two 5x5 convolutions of 32 and 64 channels, each with a 2x2 max-pool, and layers of 1024 and 256.
The paper does not state the padding. On 1x28x28 with 10 classes: 3,529,354 parameters with
`same`, 1,366,666 with `valid`. Read literally it puts a ReLU after the last layer, too; that is
left out, since logits may be negative, unless `relu_on_logits` is true.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedlens.models.two_convolutions import two_convolutions


def fedns_cnn(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    padding: Literal["same", "valid"] = "same",
    relu_on_logits: bool = False,
) -> nn.Module:
    """The Fashion-MNIST CNN of FedNS.

    Args:
        padding: whether convolutions keep the size of images (`same`), or cut it (`valid`).
        relu_on_logits: a ReLU after the last layer, as the paper says.
    """
    pad = 2 if padding == "same" else 0
    model = two_convolutions(
        "fedns-cnn", shape, num_classes, channels=(32, 64), hidden=(1024, 256), padding=(pad, pad)
    )
    if relu_on_logits:
        model.add_module("relu5", nn.ReLU())
    return model
