"""A model with BatchNorm for images of 8×8: code of a site's own."""

from torch import nn

NAME = "tests.fleet.normed:model"


def model(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, num_classes),
    )
