"""Initial weights by a named rule."""

from __future__ import annotations

from typing import Literal

from torch import nn

Rule = Literal["glorot", "he"]


def initialise(module: nn.Module, rule: Rule) -> None:
    """Draw the weights of all convolutions and linear layers anew, and set their biases to 0.

    Weights are uniform, with the variance of Glorot and Bengio (AISTATS 2010), or of He et al.
    (ICCV 2015) by the number of inputs.
    """
    layers = [m for m in module.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    if not layers:
        raise ValueError(
            f"initialise is {rule!r}, but the model has no layer to draw: leave it out"
        )
    for layer in layers:
        if rule == "glorot":
            nn.init.xavier_uniform_(layer.weight)
        else:
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
