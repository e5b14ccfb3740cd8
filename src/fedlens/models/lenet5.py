"""LeNet-5 (LeCun et al., Proceedings of the IEEE, 1998) in its usual modern form.

5x5 convolutions of 6 and 16 channels and layers of 120 and 84, with ReLU and 2x2 max-pools where
the original has tanh, learned average pools and a partly connected second convolution. LeNet-5
takes 32x32, so smaller images are padded by 2 in the first convolution. On 1x28x28 (or 1x32x32)
with 10 classes: 61,706 parameters.
"""

from __future__ import annotations

from torch import nn

from fedlens.models.two_convolutions import two_convolutions


def lenet5(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pools."""
    pad = 2 if min(shape[1:]) < 32 else 0
    return two_convolutions(
        "lenet5", shape, num_classes, channels=(6, 16), hidden=(120, 84), padding=(pad, 0)
    )
