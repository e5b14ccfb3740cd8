"""A model of one wide hidden layer, as large as is wanted: code of a site's own."""

from torch import nn

NAME = "tests.fleet.wide:model"


def model(shape: tuple[int, int, int], num_classes: int, *, hidden: int = 100) -> nn.Module:
    channels, height, width = shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )
