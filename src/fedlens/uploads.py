"""What clients send, added up as it arrives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlens.core import Memory, Tree
from fedlens.trees import copies
from fedlens.work import Part

NORM = "update_norm"  # the scalar by which the server tells sound updates from others


class Uploads:
    """What the clients of one experiment send, added up in cohort order as it arrives."""

    def __init__(self) -> None:
        self.update: Tree = {}
        self.counters: Tree = {}
        self.extra: Memory = {}
        self.parts: list[Part] = []

    def add(self, part: Part) -> None:
        if part.combined:
            self.update = _added(self.update, part.update, part.borrowed)
        for name, tree in part.extra.items():
            self.extra[name] = _added(
                self.extra.get(name, {}), tree, borrowed=True
            )  # servers keep it
        for name, count in part.counters.items():
            self.counters[name] = torch.maximum(self.counters.get(name, count), count)
        self.parts.append(part._replace(extra={}, update={} if part.combined else part.update))

    def whole(self) -> Part:
        """All parts as one."""
        combined = self.parts[0].combined
        update = self.update if combined else _join([part.update for part in self.parts])
        keep = [memory for part in self.parts for memory in part.keep]
        scalars = _join([dict(part.scalars) for part in self.parts])
        channel = _join([dict(part.channel_scalars) for part in self.parts])
        return Part(
            update,
            self.counters,
            self.extra,
            keep,
            scalars,
            combined,
            borrowed=False,
            channel_scalars=channel,
        )


def _added(total: Tree, part: Tree, borrowed: bool) -> Tree:
    """`total` plus `part`, in the place of `total`."""
    if not total:
        first: Tree = copies(part) if borrowed else part
        return first
    for name, tensor in total.items():
        tensor += part[name]
    return total


def _join(trees: list[Tree]) -> Tree:
    if len(trees) == 1:
        return trees[0]
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}


def norm_of(trees: Sequence[Tree], loss: Tensor) -> Tensor:  # [C] float64
    """The norm of all that each client sends; not finite if any of it, or its loss, is not."""
    squares = [
        t.double().reshape(len(t), -1).square().sum(1)
        for tree in trees
        for t in tree.values()
        if t.is_floating_point()
    ]
    return torch.stack(squares).sum(0).sqrt() + 0 * loss.double()
