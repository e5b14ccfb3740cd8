"""The CIFAR CNN of Hsu, Qi and Brown (2019, arXiv 1909.06335; 2020, arXiv 2003.08082).

Two 5x5 convolutions of 64 channels, each with a 2x2 max-pool, and layers of 384 and 192: the net
of McMahan et al. and of TensorFlow's tutorial. The papers do not state the padding. On 3x32x32
with 10 classes: 797,962 parameters with `valid`, as in public implementations on the same splits,
and 1,756,426 with `same` (1,068,298 on 24x24 crops).
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedlens.models.two_convolutions import two_convolutions


def hsu_cnn(
    shape: tuple[int, int, int],
    num_classes: int,
    *,
    padding: Literal["valid", "same"] = "valid",
) -> nn.Module:
    """The CIFAR CNN of Hsu et al.

    Args:
        padding: whether convolutions cut the size of images (`valid`), or keep it (`same`).
    """
    pad = 2 if padding == "same" else 0
    return two_convolutions(
        "hsu-cnn", shape, num_classes, channels=(64, 64), hidden=(384, 192), padding=(pad, pad)
    )
