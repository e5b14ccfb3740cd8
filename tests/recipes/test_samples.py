"""The pictures of a recipe that shows samples."""

import numpy as np
import torch

from fedlens.core.federation import Dataset, Examples
from fedlens.recipes.samples import _first


def test_samples_of_a_class_are_its_own_where_examples_share_the_images_of_a_larger_set() -> None:
    values = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 1, 2, 2)
    whole = Examples(values, torch.tensor([0, 0, 1, 1, 0, 1]))
    train, test = whole.take(torch.tensor([5, 4, 3])), whole.take(torch.tensor([0, 2]))
    pictures = _first(Dataset("six", train, test, ("a", "b")), 1, 2)
    assert [int(np.asarray(one)[0, 0]) for one in pictures] == [5, 3]
