"""Figure 2: CIFAR-10 with AlexNet."""

from fedlens.recipes.fedns.setting import CIFAR, figure
from fedlens.recipes.recipe import Recipe, Scale


def figure2(scale: Scale) -> Recipe:
    return figure(CIFAR, scale)
