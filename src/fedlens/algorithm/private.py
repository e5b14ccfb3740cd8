"""Differential privacy of clients: clipped as one vector, summed in equal shares, with noise.

A client sends d / max(1, ||d|| / clip), the norm being that of everything it sends, in float64; an
update that is not finite counts as zeros. Every update has the same share, whoever takes part, so
one client moves the sum by at most one clip times that share, and the server adds noise of `noise`
times that (McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language
Models, ICLR 2018). With noise 0 and a clip that nobody reaches it is FedAvg with equal shares.

What the server adds noise to is then rounded to a grid a thousandth as fine as the noise, so that
the low-order bits of floats, by which noise could be told from what it hides, are gone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm.algorithm import Algorithm
from fedlens.algorithm.pieces import (
    ByExamples,
    Constant,
    Cyclic,
    Equally,
    OwnModel,
    Poisson,
    Uniformly,
    WeightedSum,
)
from fedlens.algorithm.slots import ChannelStep, Decoded, Encoded, Select, Weigh
from fedlens.core import Cohort, Memory, Tree, keys
from fedlens.network import ops
from fedlens.network.layout import Layout
from fedlens.privacy.events import Release
from fedlens.privacy.mechanisms import Adaptive
from fedlens.privacy.protection import Protection

BELOW = "below the clip"  # its place in an update: b - 1/2 of each client, see `Adaptive`
GRID = 2**10  # steps of the grid in a standard deviation of the noise, at least
SHORTER = 1 - 2.0**-40  # so that rounding leaves nothing longer than the clip


@dataclass(frozen=True)
class ClipAndNoise(ChannelStep):
    """The clients' half clips; the server's half adds noise to the sum, once a round."""

    privacy: Protection
    share: float  # of an update in the sum
    scales: ClassVar[bool] = True
    covers: ClassVar[bool] = True
    tells: ClassVar[frozenset[str]] = frozenset({"clip"})

    def check(self, layout: Layout, weigh: Weigh) -> None:
        buffers = [name for name, entry in layout.entries.items() if entry.role == "buffer"]
        if buffers:
            raise ValueError(
                f"privacy: the model has statistics of its clients' data, as {buffers[0]}, which "
                'noise would spoil: set norm = "group"'
            )

    def begin(self, params: Tree) -> Memory:
        memory = self.privacy.mechanism.begin(self.privacy.rounds)
        if isinstance(self.privacy.clip, Adaptive):
            like = next(iter(params.values()))
            memory["clip"] = {"clip": like.new_tensor(self.privacy.clip.start, dtype=torch.float64)}
        return memory

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        sent, below = clipped(update, self._clip(memory))
        if isinstance(self.privacy.clip, Adaptive):
            sent[BELOW] = below.double()[:, None] - 0.5
        return Encoded(sent)

    def decode(
        self, combined: Tree, key: Tensor, cohort: Cohort, memory: Memory, round: int
    ) -> Decoded:
        privacy, scalars = self.privacy, dict[str, Tensor]()
        if round >= privacy.rounds:
            raise ValueError(f"privacy: the noise is for {privacy.rounds} rounds: ask for no more")
        clip, noise = torch.as_tensor(self._clip(memory), dtype=torch.float64), privacy.noise
        # In alphabetical order, for engines may have others, and noise must not depend on them.
        update = {name: combined[name] for name in sorted(combined) if name != BELOW}
        scale = self.share * privacy.cohort / privacy.noise_cohort  # of a clip, in the sum
        device = next(iter(combined.values())).device
        kept = dict(memory)
        if isinstance(privacy.clip, Adaptive):
            noise, count_noise = privacy.clip.split(noise, privacy.noise_cohort)
            sums = combined.get(BELOW, torch.zeros_like(clip))  # no client: none
            share = sums.sum() / (self.share * privacy.cohort) + 0.5
            if noise:
                deviation = torch.as_tensor(count_noise / privacy.noise_cohort, dtype=torch.float64)
                drawn = ops.normals(keys.fold(key, 1), 1, device)[0]
                share = _on_grid(share + drawn * deviation, deviation)
            later = clip * torch.exp(-privacy.clip.lr * (share - privacy.clip.quantile))
            kept["clip"], scalars["clip"] = {"clip": later}, clip
        if noise:
            sizes = [u.numel() for u in update.values()]
            fresh = ops.normals(keys.fold(key, 0), sum(sizes), device)
            own = {name: tree for name, tree in kept.items() if name != "clip"}
            drawn, own = privacy.mechanism.noise(round, fresh, own)
            kept |= own
            deviation = noise * clip * scale
            whole = torch.cat([u.flatten() for u in update.values()]).add_(drawn * deviation)
            parts = torch.split(_on_grid(whole, deviation), sizes)
            update = {n: p.view_as(u) for (n, u), p in zip(update.items(), parts, strict=True)}
        return Decoded(update, scalars, kept)

    def release(self, round: int) -> Release | None:
        return self.privacy.release(round)

    def _clip(self, memory: Memory) -> Tensor | float:
        clip = self.privacy.clip
        return memory["clip"]["clip"] if isinstance(clip, Adaptive) else clip


def clipped(update: Tree, clip: Tensor | float) -> tuple[Tree, Tensor]:
    """Each client's update [C, ...], no longer than the clip as one vector, and who needed none.

    An update that is not finite counts as zeros.
    """
    sizes = [u[0].numel() for u in update.values()]
    rows = torch.cat([u.flatten(1) for u in update.values()], 1)  # [C, n]
    norm = torch.linalg.vector_norm(rows, dim=1)  # [C]
    below = norm <= clip
    factor = torch.where(below, 1.0, clip * SHORTER / norm)
    ops.shorten_(rows, torch.where(norm.isfinite(), factor, 0.0))
    parts = torch.split(rows, sizes, 1)
    return {n: p.view(u.shape) for (n, u), p in zip(update.items(), parts, strict=True)}, below


def _on_grid(noisy: Tensor, deviation: Tensor) -> Tensor:
    """Rounded in place."""
    step = torch.exp2(torch.floor(torch.log2(deviation / GRID)))
    return noisy.div_(step).round_().mul_(step)


def with_privacy(base: Algorithm, privacy: Protection) -> Algorithm:
    """Any algorithm whose clients send one difference each, with privacy for the clients."""
    server: tuple[object, ...] = (base.advance, *base.tell)
    for leaks, why in (
        (base.discloses, f"clients disclose their {' and '.join(sorted(base.discloses))}"),
        (isinstance(base.personal, OwnModel), "its clients send no update"),
        (base.pace, "in asynchronous rounds the fastest take part, and the data may decide who is"),
        (type(base.select) is not Uniformly, "it has a way of its own to choose clients"),
        (
            type(base.weigh) not in (ByExamples, Equally, Constant),
            "what an update counts depends on the clients' data",
        ),
        (type(base.combine) is not WeightedSum, "its server needs more than the sum of updates"),
        (
            any(getattr(one, "reads_cohort", True) for one in server),
            "its server reads more than the sum of updates",
        ),
    ):
        if leaks:
            raise ValueError(f"privacy does not cover this algorithm ({why}): choose another one")
    if isinstance(privacy.clip, Adaptive):
        privacy.clip.split(privacy.noise, privacy.noise_cohort)
    share = _share(base.weigh, privacy)
    step = ClipAndNoise(privacy, share)
    return replace(
        base,
        select=_select(privacy),
        weigh=Constant(share),
        channel=(*base.channel, step),
    )


def _select(privacy: Protection) -> Select:
    if privacy.sampling == "poisson":
        return Poisson(privacy.cohort / privacy.clients, privacy.clients)
    if privacy.sampling == "cyclic":
        return Cyclic(privacy.cohort, privacy.clients, privacy.seed)
    return Uniformly(privacy.cohort)


def _share(weigh: Weigh, privacy: Protection) -> float:
    """What one client's update counts, by how the algorithm weighs without privacy."""
    if isinstance(weigh, Constant):
        return float(weigh.share)
    if weigh.over == "seen":
        raise ValueError(
            "privacy does not cover this algorithm (it counts the examples of the clients seen so "
            'far): where it has a start, set start = "cold"'
        )
    return 1 / (privacy.clients if weigh.over == "population" else privacy.cohort)
