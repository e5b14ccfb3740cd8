"""draw: which of its examples each client sees in a round, batch by batch."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedlens.algorithm.slots import Draw
from fedlens.core import Plan, keys
from fedlens.core.federation import Holdings


@dataclass(frozen=True)
class Epochs(Draw):
    """Every example `count` times, reshuffled each time; the last batch may be a short one.

    A share `uneven` of the clients has less time: each of these stops after a random number of
    its passes, at least one and fewer than all. `whole` marks that a solver relies on all passes:
    the slot then counts as refilled, and `compose` refuses a later paper that changes the passes.
    """

    count: int
    batch_size: int
    uneven: float = 0.0
    whole: bool = False
    by_client: ClassVar[bool] = True

    def __call__(self, holdings: Holdings, client_keys: Tensor) -> Plan:
        return _in_passes(holdings, client_keys, self.batch_size, self._steps)

    def plan_size(self, held: int) -> int:
        size = max(min(self.batch_size, held), 1)
        return self.count * -(-held // size) * size

    def _steps(self, per_pass: keys.Array, client_keys: keys.Array) -> keys.Array:  # [C]
        """The steps of as many passes as each client has time for."""
        if not self.uneven:
            return self.count * per_pass
        slow_key, count_key = (
            keys.fold(client_keys, keys.purpose(word)) for word in ("slow", "passes")
        )
        slow = keys.uniform(slow_key) < self.uneven
        fewer = 1 + keys.below(count_key, max(self.count - 1, 1))
        return np.where(slow, fewer, self.count) * per_pass


def epochs_of(draw: Draw, name: str, *, even: bool = True) -> Epochs:
    """`draw`, for an algorithm that counts epochs: the same number for each client, if `even`."""
    if not isinstance(draw, Epochs) or (even and draw.uneven):
        raise ValueError(
            f"{name} counts epochs: leave fedvc, uneven work and privacy of examples out, and give "
            "whole local.epochs without local.steps or max_steps"
        )
    return draw


@dataclass(frozen=True)
class Steps(Draw):
    """A number of steps of each client, or of passes over its examples; the last pass may be cut.

    The number lies between `low` and `high`, which may be equal. It is drawn for each client and
    round, a whole one if both are. No client takes more than `most` steps.
    """

    batch_size: int
    low: float
    high: float
    of: Literal["steps", "epochs"]
    most: int | None = None
    by_client: ClassVar[bool] = True

    def __call__(self, holdings: Holdings, client_keys: Tensor) -> Plan:
        return _in_passes(holdings, client_keys, self.batch_size, self._steps)

    def plan_size(self, held: int) -> int:
        size = max(min(self.batch_size, held), 1)
        per_pass = np.array([-(-held // size)])
        return int(self._cut(per_pass, np.array([self.high]))[0]) * size

    def _steps(self, per_pass: keys.Array, client_keys: keys.Array) -> keys.Array:  # [C]
        own = keys.fold(client_keys, keys.purpose("amount"))
        if float(self.low).is_integer() and float(self.high).is_integer():
            drawn = self.low + keys.below(own, int(self.high - self.low) + 1)
        else:
            drawn = self.low + keys.uniform(own) * (self.high - self.low)
        return self._cut(per_pass, drawn)

    def _cut(self, per_pass: keys.Array, amount: keys.Array) -> keys.Array:  # [C]
        if self.of == "epochs":  # 0.07 * 100 = 7.000000000000001 must count as 7
            amount = np.ceil(amount * per_pass - 1e-9)
        steps = np.minimum(amount, np.inf if self.most is None else self.most)
        return np.where(per_pass > 0, steps.clip(min=1), 0).astype(np.int64)


def _in_passes(
    holdings: Holdings,
    client_keys: Tensor,
    batch_size: int,
    steps: Callable[[keys.Array, keys.Array], keys.Array],
) -> Plan:
    """One pass after another over what each client holds, reshuffled each time.

    `steps` returns how many batches each client sees, given the batches of a pass and its key.
    """
    clients = len(holdings)
    sizes, own = holdings.sizes.numpy(), client_keys.numpy()
    most = int(sizes.max(initial=0))
    size = max(min(batch_size, most), 1)  # no batch is larger than what the largest client holds
    per_pass = (sizes + size - 1) // size  # [C] batches
    done = steps(per_pass, own)  # [C]
    num_steps = int(done.max()) if clients else 0
    num_passes = -(-done // np.maximum(per_pass, 1))
    # For all passes, one after another: the client, and which of its passes this is.
    whose = np.repeat(np.arange(clients), num_passes)
    turn = np.arange(len(whose)) - np.repeat(num_passes.cumsum() - num_passes, num_passes)
    passes = holdings if (num_passes == 1).all() else holdings.take(torch.from_numpy(whose))
    offsets = passes.offsets.numpy()
    shuffled = passes.index.numpy()[keys.shuffle_segments(offsets, keys.fold(own[whose], turn))]

    # A pass fills consecutive batches, from its first one on.
    first = whose * num_steps + turn * per_pass[whose]
    lengths = passes.sizes.numpy()
    place = np.arange(len(shuffled)) + np.repeat(first * size - offsets[:-1], lengths)
    if (done < num_passes * per_pass).any():
        seen = place < np.repeat((whose * num_steps + done[whose]) * size, lengths)
        place, shuffled = place[seen], shuffled[seen]
    index = np.zeros(clients * num_steps * size, np.int64)
    index[place] = shuffled

    step, each = np.arange(num_steps), np.maximum(per_pass, 1)[:, None]
    taken = step % each * size  # [C, T] earlier examples of the same pass
    counts = np.minimum(np.maximum(sizes[:, None] - taken, 0), size)
    return Plan(
        torch.from_numpy(index).view(clients, num_steps, size),
        torch.from_numpy(counts * (step < done[:, None])),
    )


@dataclass(frozen=True)
class Virtual(Draw):
    """`size` examples of each client, in full batches, with repeats only if it holds fewer."""

    size: int
    batch_size: int
    by_client: ClassVar[bool] = True

    def __call__(self, holdings: Holdings, client_keys: Tensor) -> Plan:
        clients, sizes = len(holdings), holdings.sizes
        shuffled = keys.shuffle_segments(
            holdings.offsets.numpy(), keys.fold(client_keys, 0).numpy()
        )
        order = torch.from_numpy(shuffled)
        place = torch.arange(self.size).expand(clients, -1)
        repeats = keys.uniform(keys.fold(client_keys[:, None], 1, place))
        repeated = (repeats * sizes[:, None]).long()
        chosen = torch.where(sizes[:, None] >= self.size, place, repeated)
        holds = sizes > 0  # a client without examples takes no step
        index = torch.zeros(clients, self.size, dtype=torch.int64)
        index[holds] = holdings.index[order[(holdings.offsets[:-1, None] + chosen)[holds]]]
        steps = self.size // self.batch_size
        counts = torch.full((clients, steps), self.batch_size) * holds[:, None]
        return Plan(index.view(clients, steps, self.batch_size), counts)

    def plan_size(self, held: int) -> int:
        return self.size


@dataclass(frozen=True)
class PoissonBatches(Draw):
    """Each example is in each batch with probability q = batch_size / n, independently of others.

    So the size of a batch varies, and may be 0; q is 1 for a client that holds fewer. A client
    takes `amount` steps, or n / batch_size steps for each of `amount` passes. The draws are by key
    or, if `secret`, from the operating system: a batch protects only who does not know it.
    """

    batch_size: int
    amount: float
    of: Literal["steps", "epochs"] = "epochs"
    secret: bool = False
    by_client: ClassVar[bool] = True

    def rate(self, held: int) -> float:
        return min(1.0, self.batch_size / max(held, 1))

    def num_steps(self, held: int) -> int:
        """The steps of a client that holds this many examples."""
        passes = held / self.batch_size if self.of == "epochs" else 1
        return max(math.ceil(self.amount * passes - 1e-9), 1) if held else 0

    def widest(self, held: int) -> int:
        """A size that batches of a client seldom exceed; the plan is wider if one does."""
        expected = min(held, self.batch_size)
        return max(min(held, -(-(expected + 4 * math.isqrt(expected)) // 8) * 8), 1)

    def plan_size(self, held: int) -> int:
        return self.num_steps(held) * self.widest(held)

    def __call__(self, holdings: Holdings, client_keys: Tensor) -> Plan:
        sizes, offsets = holdings.sizes.tolist(), holdings.offsets.tolist()
        held = holdings.index.numpy()
        taken = [self.num_steps(size) for size in sizes]
        drawn = [
            [held[first:][self._chosen(key, step, size)] for step in range(steps)]
            for key, size, steps, first in zip(
                client_keys.numpy(), sizes, taken, offsets[:-1], strict=True
            )
        ]
        counts = np.zeros((len(sizes), max(taken, default=0)), np.int64)
        for client, batches in enumerate(drawn):
            counts[client, : len(batches)] = [len(batch) for batch in batches]
        # Nearly always the same width, so that a GPU can record a step once.
        width = max(map(self.widest, sizes), default=1)
        width = max(width, -(-int(counts.max(initial=0)) // 8) * 8)
        index = np.zeros((*counts.shape, width), np.int64)
        for client, batches in enumerate(drawn):
            for step, batch in enumerate(batches):
                index[client, step, : len(batch)] = batch
        plan = (torch.from_numpy(array) for array in (index, counts, np.array(taken, np.int64)))
        return Plan(*plan)

    def _chosen(self, key: np.int64, step: int, size: int) -> keys.Array:
        """The positions, of `size`, of the examples in a batch."""
        if self.secret:
            words = np.frombuffer(os.urandom(8 * size), np.int64).copy()
        else:
            words = keys.fold(keys.fold(np.array([key]), step), np.arange(size))
        return np.flatnonzero(keys.uniform(words) < self.rate(size))
