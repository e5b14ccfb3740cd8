"""The uploads of clients, added up as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens.core import Memory, Tree
from fedlens.core.trees import copies, join
from fedlens.rounds.work import Part

NORM = "update_norm"  # the scalar by which the server finds invalid updates
PEAK = "peak"  # with secure sums: the largest number that a client would send
MEASURED = "measured"  # with secure sums: the place of the scalars' means, among the extra sums


class Sum(NamedTuple):
    """The sum of the uploads of consecutive clients."""

    num_clients: int
    update: Tree
    extra: Memory

    def plus(self, other: Sum) -> Sum:
        """The sum of both, written into the tensors of this one."""
        extra = {name: _added(tree, other.extra[name]) for name, tree in self.extra.items()}
        num_clients = self.num_clients + other.num_clients
        return Sum(num_clients, _added(self.update, other.update), extra)


class Uploads:
    """The uploads of the clients of one experiment, added up as they arrive, in cohort order.

    They are added in pairs, as in a tournament: the first two, the next two, then these four, and
    so on. Rounding depends on the order of additions, and this order is fixed. So a worker process
    that trains the clients of a pair, of two pairs, ... may add them up itself: the total is the
    same to the last bit. There are at most log2 of the cohort's size sums at a time.
    """

    def __init__(self) -> None:
        self.sums: list[Sum] = []  # each of more clients than the next
        self.counters: Tree = {}
        self.parts: list[Part] = []

    def add(self, part: Part) -> None:
        sent = Sum(part.num_clients, part.update if part.combined else {}, part.extra)
        if not self.sums or self.sums[-1].num_clients > sent.num_clients:
            # Always copied: a server may keep `extra`.
            update: Tree = copies(sent.update) if part.borrowed else sent.update
            sent = Sum(sent.num_clients, update, copies(sent.extra))
        while self.sums and self.sums[-1].num_clients <= sent.num_clients:
            sent = self.sums.pop().plus(sent)
        self.sums.append(sent)
        for name, count in part.counters.items():
            self.counters[name] = torch.maximum(self.counters.get(name, count), count)
        self.parts.append(part._replace(extra={}, update={} if part.combined else part.update))

    def whole(self) -> Part:
        """All parts as one part; nothing, if no client took part."""
        if not self.parts:
            return Part({}, {}, {}, (), {}, combined=True, borrowed=False)
        combined, total = self.parts[0].combined, self.sums[-1]
        for left in reversed(self.sums[:-1]):
            total = left.plus(total)
        self.sums = [total]
        update = total.update if combined else join([part.update for part in self.parts])
        keep = [memory for part in self.parts for memory in part.keep]
        scalars = join([dict(part.scalars) for part in self.parts])
        channel = join([dict(part.channel_scalars) for part in self.parts])
        return Part(
            update,
            self.counters,
            total.extra,
            keep,
            scalars,
            combined,
            borrowed=False,
            channel_scalars=channel,
        )


def _added(total: Tree, part: Tree) -> Tree:
    """Add `part` to `total` in place."""
    for name, tensor in total.items():
        tensor += part[name]
    return total


def norm_of(trees: Sequence[Tree], loss: Tensor) -> Tensor:  # [C] float64
    """The norm of all that each client sends; not finite if a number of it, or its loss, is not."""
    squares = [
        t.double().reshape(len(t), -1).square().sum(1)
        for tree in trees
        for t in tree.values()
        if t.is_floating_point()
    ]
    norm = torch.stack(squares).sum(0).sqrt() if squares else 0.0  # a client may send nothing
    return norm + 0 * loss.double()
