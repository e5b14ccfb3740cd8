"""Figure 1: samples of CIFAR-10."""

from fedlens.recipes import samples as of
from fedlens.recipes.recipe import Recipe, Scale

SIZES = {"training images": 50_000, "test images": 10_000, "classes": 10}


def samples(scale: Scale) -> Recipe:
    return of.samples(scale, "cifar10", 10, SIZES)
