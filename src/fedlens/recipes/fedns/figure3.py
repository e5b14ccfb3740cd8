"""Figure 3: Tiny ImageNet with ResNet-18."""

from fedlens.recipes.fedns.setting import TINY, figure
from fedlens.recipes.recipe import Recipe, Scale


def figure3(scale: Scale) -> Recipe:
    return figure(TINY, scale)
