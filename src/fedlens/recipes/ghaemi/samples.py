"""Figure 1: a sample of each class of Fashion-MNIST."""

from fedlens.recipes import samples as of
from fedlens.recipes.recipe import Recipe, Scale

SIZES = {"training images": 60_000, "test images": 10_000, "classes": 10}


def samples(scale: Scale) -> Recipe:
    return of.samples(scale, "fashion-mnist", 5, SIZES)
