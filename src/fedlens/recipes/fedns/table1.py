"""Table 1: Fashion-MNIST with a CNN of five layers."""

from fedlens.recipes.fedns.setting import FASHION, table
from fedlens.recipes.recipe import Recipe, Scale


def table1(scale: Scale) -> Recipe:
    return table(FASHION, scale)
