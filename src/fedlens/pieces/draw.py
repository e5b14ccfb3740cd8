"""draw: which of its examples each client sees in a round, batch by batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens import keys
from fedlens.core import Holdings, Plan


@dataclass(frozen=True)
class Epochs:
    """Every example `count` times, reshuffled each time; the last batch may be a short one."""

    count: int
    batch_size: int

    def __call__(self, holdings: Holdings, client_keys: Tensor) -> Plan:
        clients, epochs, size = len(holdings), self.count, self.batch_size
        # Epoch by epoch: a pass of client c over its examples is segment c * epochs + e.
        passes = holdings.take(torch.arange(clients).repeat_interleave(epochs))
        pass_keys = keys.fold(client_keys[:, None], torch.arange(epochs)).flatten()
        shuffled = passes.index[keys.shuffle_segments(passes.offsets, pass_keys)]

        per_pass = (passes.sizes + size - 1) // size  # batches
        steps = per_pass.view(clients, epochs).sum(1)
        num_steps = int(steps.max()) if clients else 0
        first = per_pass.view(clients, epochs).cumsum(1) - per_pass.view(clients, epochs)
        start = torch.arange(clients)[:, None] * num_steps + first  # [C, E] row of its first batch

        position = torch.arange(len(shuffled)) - passes.offsets[passes.owners]
        row = start.flatten()[passes.owners] + position // size
        index = shuffled.new_zeros(clients * num_steps, size)
        index[row, position % size] = shuffled
        counts = torch.bincount(row, minlength=clients * num_steps)
        return Plan(index.view(clients, num_steps, size), counts.view(clients, num_steps))
