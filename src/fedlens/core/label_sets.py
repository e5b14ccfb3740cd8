"""The labels of an example that may have several, as the bits of one whole number."""

import torch
from torch import Tensor

MOST = 62
"""Labels that one number can tell apart."""


def packed(rows: Tensor) -> Tensor:  # [..., L] -> [...] int64
    """Rows of 1 for a label that an example has and 0 for any other, each as one number."""
    return (rows.long() << torch.arange(rows.shape[-1], device=rows.device)).sum(-1)


def unpacked(sets: Tensor, num_labels: int) -> Tensor:  # [...] -> [..., L] int64
    """The rows of 0 and 1 that `packed` was given."""
    return sets.unsqueeze(-1) >> torch.arange(num_labels, device=sets.device) & 1
