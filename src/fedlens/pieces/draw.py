"""draw: which of its examples each client sees in a round, batch by batch."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedlens import keys
from fedlens.core import Plan
from fedlens.federation import Holdings
from fedlens.slots import Draw


@dataclass(frozen=True)
class Epochs(Draw):
    """Every example `count` times, reshuffled each time; the last batch may be a short one.

    A share `uneven` of the clients has less time: each of these stops after a random number of
    its passes, at least one and fewer than all.
    """

    count: int
    batch_size: int
    uneven: float = 0.0
    by_client: ClassVar[bool] = True  # what one sees does not depend on the others

    def __call__(self, holdings: Holdings, client_keys: Tensor) -> Plan:
        clients, epochs = len(holdings), self.count
        sizes, own = np.diff(holdings.offsets.numpy()), client_keys.numpy()
        most = int(sizes.max()) if clients else 1
        size = max(min(self.batch_size, most), 1)  # nobody's batch is larger than all it holds
        # Pass e of client c over its examples is segment c * epochs + e.
        passes = holdings
        if epochs > 1:
            passes = holdings.take(torch.arange(clients).repeat_interleave(epochs))
        pass_keys = keys.fold(own[:, None], np.arange(epochs)).ravel()
        offsets = passes.offsets.numpy()
        shuffled = passes.index.numpy()[keys.shuffle_segments(offsets, pass_keys)]

        per_pass = (sizes[:, None] + size - 1) // size  # [C, 1] batches
        num_steps = epochs * int(per_pass.max()) if clients else 0
        # A pass fills the batches from its first one on, in a row.
        first = np.arange(clients)[:, None] * num_steps + np.arange(epochs) * per_pass
        shift = first.ravel() * size - offsets[:-1]
        place = np.arange(len(shuffled)) + np.repeat(shift, np.diff(offsets))
        index = np.zeros(clients * num_steps * size, np.int64)
        index[place] = shuffled

        step = np.arange(num_steps)
        taken = step % per_pass.clip(min=1) * size  # [C, T] examples of the same pass before
        counts = (sizes[:, None] - taken).clip(0, size)
        done = epochs * per_pass
        if self.uneven:
            done = self._passes(own)[:, None] * per_pass
        return Plan(
            torch.from_numpy(index).view(clients, num_steps, size),
            torch.from_numpy(counts * (step < done)),
        )

    def plan_size(self, held: int) -> int:
        size = max(min(self.batch_size, held), 1)
        return self.count * -(-held // size) * size

    def _passes(self, client_keys: keys.Array) -> keys.Array:  # [C]
        """How many passes each client has time for."""
        slow_key, count_key = (
            keys.fold(client_keys, keys.purpose(word)) for word in ("slow", "passes")
        )
        slow = keys.uniform(slow_key) < self.uneven
        fewer = 1 + keys.below(count_key, max(self.count - 1, 1))
        return np.where(slow, fewer, self.count)


@dataclass(frozen=True)
class Virtual(Draw):
    """`size` examples of each client, in full batches: with repeats only if it has fewer."""

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
        index = holdings.index[order[holdings.offsets[:-1, None] + chosen]]
        steps = self.size // self.batch_size
        counts = torch.full((clients, steps), self.batch_size)
        return Plan(index.view(clients, steps, self.batch_size), counts)

    def plan_size(self, held: int) -> int:
        return self.size
