"""The weights of a linear layer as a product of factors (see engines/factored.py)."""

from typing import NamedTuple

from torch import Tensor


class Factors(NamedTuple):
    """Each client's matrix as w = start - lr * grads' inputs (see engines/factored.py).

    Clients stand in G groups of the same size, with a start each; numbers are those of groups or
    of clients. Each further step takes a row's part down by 2 ** log_decay, and adds -lr * drift.
    """

    start: Tensor  # [G, out, features]
    inputs: Tensor  # [C, T * B, features] of the steps so far; zeros where none was taken yet
    grads: Tensor  # [C, T * B, out] of the layer's outputs
    step: Tensor  # [] int64: how many steps were taken, by all who still train
    batch: int  # rows of inputs and grads that belong to a step
    lr: Tensor  # [G] or [C]
    log_decay: Tensor  # [G] or [C]
    drift: Tensor | None = None  # [C, out, features]
    times: Tensor | None = None  # [G or C, T + 1] how often it is in the weights, by steps taken
    by_pixel: bool = False  # whether features are those of flattened images, pixel by pixel
