"""The MNIST CNN of McMahan et al. (AISTATS 2017, arXiv 1602.05629).

Two 5x5 convolutions of 32 and 64 channels, each with a 2x2 max-pool, and a layer of 512. On
1x28x28 with 10 classes: 1,663,370 parameters in both geometries. `same` keeps the size in a
convolution (28, 14, 14, 7); `paper4` is the table in Ghaemi's report on FedAvg, FedProx and
ADMM, which pads convolutions and pools by 1 (26, 14, 12, 7).
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedlens.models.two_convolutions import two_convolutions


def mcmahan_cnn(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    geometry: Literal["same", "paper4"] = "same",
) -> nn.Module:
    """The MNIST CNN of McMahan et al.

    Args:
        geometry: `paper4` pads convolutions and pools by 1; `same` keeps the size of images.
    """
    pad, pool = (2, 0) if geometry == "same" else (1, 1)
    return two_convolutions(
        "mcmahan-cnn",
        shape,
        num_classes,
        channels=(32, 64),
        hidden=(512,),
        padding=(pad, pad),
        pool_padding=pool,
    )
