"""Table 3: Tiny ImageNet with ResNet-18."""

from fedlens.recipes.fedns.setting import TINY, table
from fedlens.recipes.recipe import Recipe, Scale


def table3(scale: Scale) -> Recipe:
    return table(TINY, scale)
