"""draw: which of its examples each client sees in a round, batch by batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedlens import keys
from fedlens.core import Plan
from fedlens.federation import Holdings
from fedlens.slots import Draw

WHOLE_EPOCHS = (
    "leave fedvc and uneven work out, and give whole local.epochs without local.steps or max_steps"
)
"""What to do where an algorithm needs `Epochs`, all of them."""


@dataclass(frozen=True)
class Epochs(Draw):
    """Every example `count` times, reshuffled each time; the last batch may be a short one.

    A share `uneven` of the clients has less time: each of these stops after a random number of
    its passes, at least one and fewer than all. `whole` says that this may not be: a solver counts
    on all passes, so that whoever comes later and changes them is refused.
    """

    count: int
    batch_size: int
    uneven: float = 0.0
    whole: bool = False
    by_client: ClassVar[bool] = True  # what one sees does not depend on the others

    def __call__(self, holdings: Holdings, client_keys: Tensor) -> Plan:
        return _in_passes(holdings, client_keys, self.batch_size, self._steps)

    def plan_size(self, held: int) -> int:
        size = max(min(self.batch_size, held), 1)
        return self.count * -(-held // size) * size

    def _steps(self, per_pass: keys.Array, client_keys: keys.Array) -> keys.Array:  # [C]
        """As many passes as each client has time for."""
        if not self.uneven:
            return self.count * per_pass
        slow_key, count_key = (
            keys.fold(client_keys, keys.purpose(word)) for word in ("slow", "passes")
        )
        slow = keys.uniform(slow_key) < self.uneven
        fewer = 1 + keys.below(count_key, max(self.count - 1, 1))
        return np.where(slow, fewer, self.count) * per_pass


@dataclass(frozen=True)
class Steps(Draw):
    """A number of steps of each client, or of passes over its examples, of which the last is cut.

    The number lies between `low` and `high`, which may be the same: it is drawn for each client
    and round, a whole one if both are. Nobody takes more than `most` steps.
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
        if self.of == "epochs":  # 0.1 of 30 batches must not be rounded to 4
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

    `steps` says how many batches each sees, given how many a pass has, and its key.
    """
    clients = len(holdings)
    sizes, own = holdings.sizes.numpy(), client_keys.numpy()
    most = int(sizes.max(initial=0))
    size = max(min(batch_size, most), 1)  # nobody's batch is larger than all it holds
    per_pass = (sizes + size - 1) // size  # [C] batches
    done = steps(per_pass, own)  # [C]
    num_steps = int(done.max()) if clients else 0
    num_passes = -(-done // np.maximum(per_pass, 1))
    # Of all passes, one after another: whose each is, and which of this client's own.
    whose = np.repeat(np.arange(clients), num_passes)
    turn = np.arange(len(whose)) - np.repeat(num_passes.cumsum() - num_passes, num_passes)
    passes = holdings if (num_passes == 1).all() else holdings.take(torch.from_numpy(whose))
    offsets = passes.offsets.numpy()
    shuffled = passes.index.numpy()[keys.shuffle_segments(offsets, keys.fold(own[whose], turn))]

    # A pass fills the batches from its first one on, in a row.
    first = whose * num_steps + turn * per_pass[whose]
    lengths = passes.sizes.numpy()
    place = np.arange(len(shuffled)) + np.repeat(first * size - offsets[:-1], lengths)
    if (done < num_passes * per_pass).any():
        seen = place < np.repeat((whose * num_steps + done[whose]) * size, lengths)
        place, shuffled = place[seen], shuffled[seen]
    index = np.zeros(clients * num_steps * size, np.int64)
    index[place] = shuffled

    step, each = np.arange(num_steps), np.maximum(per_pass, 1)[:, None]
    taken = step % each * size  # [C, T] examples of the same pass before
    counts = np.minimum(np.maximum(sizes[:, None] - taken, 0), size)
    return Plan(
        torch.from_numpy(index).view(clients, num_steps, size),
        torch.from_numpy(counts * (step < done[:, None])),
    )


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
        holds = sizes > 0  # one without examples has none to repeat, and takes no step
        index = torch.zeros(clients, self.size, dtype=torch.int64)
        index[holds] = holdings.index[order[(holdings.offsets[:-1, None] + chosen)[holds]]]
        steps = self.size // self.batch_size
        counts = torch.full((clients, steps), self.batch_size) * holds[:, None]
        return Plan(index.view(clients, steps, self.batch_size), counts)

    def plan_size(self, held: int) -> int:
        return self.size
