"""A network of one's own: named in an experiment file as `own_network:three_layers`."""

from torch import nn


def three_layers(
    shape: tuple[int, int, int], num_classes: int, *, hidden: int = 200, dropout: float = 0.2
) -> nn.Module:
    """Three linear layers, with dropout between them."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, num_classes),
    )
