"""The weights of a linear layer as a product of factors (see engines/factored.py)."""

from typing import NamedTuple

from torch import Tensor


class Factors(NamedTuple):
    """Each client's matrix as w = start - lr * grads' inputs (see engines/factored.py).

    Clients form G groups of equal size, and each group has one start. `lr` and `log_decay` are per
    group or per client. Each later step multiplies a row's part by 2 ** log_decay, and adds
    -lr * drift.
    """

    start: Tensor  # [G, out, features]
    inputs: Tensor  # [C, T * B, features] of the steps so far; zeros for later steps
    grads: Tensor  # [C, T * B, out] of the layer's outputs
    step: Tensor  # [] int64: steps taken so far by every client that still trains
    batch: int  # rows of inputs and grads per step
    lr: Tensor  # [G] or [C]
    log_decay: Tensor  # [G] or [C]
    drift: Tensor | None = None  # [C, out, features]
    times: Tensor | None = None  # [G or C, T + 1] factor of the drift in w, by steps taken
    by_pixel: bool = False  # whether features are images flattened pixel by pixel
