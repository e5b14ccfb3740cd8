"""Figure 1: Fashion-MNIST with a CNN of five layers."""

from fedlens.recipes.fedns.setting import FASHION, figure
from fedlens.recipes.recipe import Recipe, Scale


def figure1(scale: Scale) -> Recipe:
    return figure(FASHION, scale)
