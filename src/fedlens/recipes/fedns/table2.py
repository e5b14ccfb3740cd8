"""Table 2: CIFAR-10 with AlexNet."""

from fedlens.recipes.fedns.setting import CIFAR, table
from fedlens.recipes.recipe import Recipe, Scale


def table2(scale: Scale) -> Recipe:
    return table(CIFAR, scale)
