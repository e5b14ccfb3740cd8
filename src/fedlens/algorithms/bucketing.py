"""Bucketing (Karimireddy et al., ICLR 2022, arXiv:2006.09365), algorithm 1.

Updates are put into buckets of `size` in random order, drawn anew each round, and the combination
that stands before it in the experiment is made of the buckets' means. So honest clients with
different data look more alike to it. One hostile client spoils one bucket. With size = 1 it is the
combination without it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import Combine, Received
from fedlens.algorithms.before import Before, check_before, traced
from fedlens.core import Memory, Tree, keys
from fedlens.core.trees import moved


@dataclass(frozen=True)
class Bucketing(Before):
    inner: Combine
    size: int

    @property
    def fewest(self) -> int:
        return (self.inner.fewest - 1) * self.size + 1

    def withstands(self, clients: int) -> int | None:
        return self.inner.withstands(-(-clients // self.size))

    def update(self, given: Received) -> tuple[Tree, Memory]:
        clients, device = len(given.shares), given.shares.device
        draws = keys.fold(given.key, torch.arange(clients))
        order = moved(draws.argsort(stable=True), device)
        bucket = torch.arange(clients, device=device) // self.size  # of each place in the order
        num_buckets = -(-clients // self.size)
        counts = torch.bincount(bucket, minlength=num_buckets)
        means = {}
        for name, u in given.updates.items():
            sums = u.new_zeros(num_buckets, *u.shape[1:]).index_add_(0, bucket, u[order])
            means[name] = sums / counts.to(u).view(-1, *[1] * (u.ndim - 1))
        equal = given.shares.new_full((num_buckets,), 1 / num_buckets)
        made, memory = self.inner.update(given._replace(updates=means, shares=equal))

        def back(trust: Tensor) -> Tensor:
            return trust.new_zeros(clients).index_copy(0, order, (trust / counts)[bucket])

        return made, traced(memory, back)


@paper
def bucketing(base: Algorithm, size: int = 2) -> Algorithm:
    """Average clients in small random groups before a robust combination.

    Args:
        size: s, the clients of a bucket; 2 is what the paper recommends.
    """
    inner = base.combine
    check_before(base, "bucketing")
    if size < 1:
        raise ValueError(f"bucketing: size is {size}: choose 1 or more")
    buckets = -(-base.select.cohort_size // size)
    if buckets < inner.fewest:
        raise ValueError(
            f"bucketing: {buckets} buckets of {size} are too few, since {inner.fewest} are needed: "
            "choose a smaller size, or more clients a round"
        )
    return replace(base, combine=Bucketing(inner, size))
