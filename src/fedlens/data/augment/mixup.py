"""Mixup (Zhang et al., ICLR 2018, arXiv:1710.09412): images of two examples in one.

An image becomes share x_i + (1 - share) x_j, and its loss share l(y_i) + (1 - share) l(y_j), where
share is from Beta(alpha, alpha). Every example has a share and a partner of its own, drawn from the
batch of its client; the original has one share for a whole batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens.core import Batch, keys
from fedlens.data.augment.changes import as_floats, as_they_were


class Mixture(NamedTuple):
    """Which image of its batch each image is mixed with, and the share of the image itself."""

    partner: Tensor  # [C, B] rows of the batch
    share: Tensor  # [C, B] float64

    def of_images(self, images: Tensor) -> Tensor:  # [C, B, channels, H, W]
        x = as_floats(images)
        share = self.share.to(x)[:, :, None, None, None]
        return as_they_were(share * x + (1 - share) * self._partners(x), images)

    def two_labels(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Each mixed image as two examples with weights `share` and 1 - `share`: [C, 2 B].

        So a weighting of examples by their labels applies to both labels.
        """
        share = self.share.to(batch.mask)
        return torch.cat([logits, logits], 1), Batch(
            images=torch.cat([batch.images, batch.images], 1),
            labels=torch.cat([batch.labels, self._partners(batch.labels)], 1),
            mask=torch.cat([batch.mask * share, batch.mask * (1 - share)], 1),
        )

    def _partners(self, rows: Tensor) -> Tensor:  # [C, B, ...]
        client = torch.arange(len(rows), device=rows.device)[:, None]
        return rows[client, self.partner]


def mixture(row_key: Tensor, counts: Tensor, alpha: float) -> Mixture:
    """Draw it by a key for each image [C, B]; the first `counts` [C] of a batch are examples."""
    drawn = keys.uniform(keys.fold(row_key, 0)) * counts[:, None]
    # Beta(a, a) in closed form, from Student's t (Bailey, 1994; Devroye, 1996). 1 - u is above 0.
    root = (1 - keys.uniform(keys.fold(row_key, 1))) ** (-1 / alpha) - 1
    cos = (2 * math.pi * keys.uniform(keys.fold(row_key, 2))).cos()
    squared = root * cos.square()  # it may be infinite if alpha is small
    return Mixture(drawn.long(), (1 + cos.sign() / (1 + 1 / squared).sqrt()) / 2)
