"""objective: a gradient that protects single examples (Abadi et al., CCS 2016)."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.core import Local, Number, Tree, is_on, keys, per_row
from fedlens.network.ops import noisy_mean

GRID = 2.0**-12  # of the noise's standard deviation, rounded down to a power of two


@dataclass(frozen=True)
class PerExample:
    """The gradient of a step of DP-SGD, in place of the mean gradient of a batch:

        g = (sum over examples i of g_i min(1, clip / ||g_i||) + noise * clip * N(0, I)) / expected

    The norm is that of all parameters together, so that one example more or less moves the sum by
    at most `clip`. `expected` is what a batch holds in expectation, see `PoissonBatches`: how many
    examples it really holds stays unknown.

    Noise is drawn by key. If `secret` it comes from the operating system, since a key is known to
    the server; and the noisy sum is rounded to a grid that is coarse for floats and fine for the
    noise, so that no low-order bits tell which sum the noise was added to.

    `adds` is for an audit, which puts gradients of its own into the sums.

    An example is in one label count, so noise of standard deviation `count_noise` on each count is
    that of one more release. If it is 0, clients send no counts.
    """

    clip: Number
    noise: Number
    batch_size: int
    count_noise: Number = 0.0
    secret: bool = False
    adds: Callable[[Tree, Local], Tree] | None = None

    def __call__(self, sums: Tree, local: Local) -> Tree:
        """The gradients [C, ...] from the sums of clipped gradients."""
        sums = sums if self.adds is None else self.adds(sums, local)
        counts = local.facts.size.clamp(1, self.batch_size)  # [C]
        if not is_on(self.noise):
            return {name: total / per_row(counts.to(total), total) for name, total in sums.items()}
        first = next(iter(sums.values()))
        std = torch.as_tensor(self.noise * self.clip, dtype=torch.float64, device=first.device)
        if self.secret:
            return {n: _secretly_noisy(s, std) / per_row(counts.to(s), s) for n, s in sums.items()}
        key, std = local.key("noise"), std.expand(len(counts)).contiguous()
        return {
            name: noisy_mean(total, key, number, std, counts)
            for number, (name, total) in enumerate(sums.items())
        }

    def noisy_counts(self, counts: Tensor, client_keys: Tensor) -> Tensor:  # [C, L], [C]
        """Label counts as clients send them: by keys that are the same in every round."""
        own = keys.fold(client_keys[:, None], torch.arange(counts.shape[1]))
        return (counts + self.count_noise * keys.normal(own)).round().clamp(min=0)


def _secretly_noisy(total: Tensor, std: Tensor) -> Tensor:
    """With noise from the operating system, on the grid."""
    half = -(-total[0].numel() // 2)
    drawn = bytearray(os.urandom(8 * len(total) * half))
    words = torch.frombuffer(drawn, dtype=torch.int64).view(-1, half).to(total.device)
    normal = keys.pairs_of_normals(words, torch.float64)[:, : total[0].numel()].view(total.shape)
    noisy = normal.mul_(per_row(std, total)).add_(total)
    step = per_row((std.log2().floor().exp2() * GRID), total)
    return ((noisy / step).round() * step).to(total)
