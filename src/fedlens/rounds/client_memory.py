"""What clients remember between rounds, and where it is: on a GPU, on the host, in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedlens.core import Memory
from fedlens.core.by_client import ByClient, Elsewhere
from fedlens.core.trees import moved, on_host, tensors_in

REMEMBERED = 0.25
"""The share of a GPU's memory that what clients remember may take, and of what is free on the host:
there a checkpoint of it takes as much two times more."""


@dataclass(frozen=True)
class Room:
    """How many bytes of clients' memory find room, and what becomes of the others'."""

    gpu: int | None = None  # None: it is on the host anyway
    host: int | None = None  # None: all of it has room there
    store: Callable[[int, int, Memory], Elsewhere[Memory]] | None = None
    """Writes what a client remembers after a round to a file."""

    def on(self, device: torch.device) -> Room:
        """The same with the room on the GPU, if clients train on one."""
        if device.type != "cuda":
            return self
        total = torch.cuda.get_device_properties(device).total_memory
        return replace(self, gpu=int(REMEMBERED * total))

    def divided(self, count: int) -> Room:
        """The room of each of some experiments that train side by side."""
        gpu, host = (None if size is None else size // count for size in (self.gpu, self.host))
        return replace(self, gpu=gpu, host=host)

    def places(
        self, rows: Mapping[int, Memory], round: int
    ) -> Mapping[int, Memory | Elsewhere[Memory]]:
        """What each client remembers after this round, put where there is room.

        That of clients with small numbers stays, so that which these are need not be known.
        """
        if self == Room():
            return rows
        each = max(sum(t.nbytes for t in tensors_in(next(iter(rows.values())))), 1)
        stay = 0 if self.gpu is None else self.gpu // each
        fit = None if self.host is None else stay + self.host // each

        def place(client: int, row: Memory) -> Memory | Elsewhere[Memory]:
            if client < stay:
                return row
            if self.store is not None and fit is not None and client >= fit:
                return self.store(client, round, row)
            return row if self.gpu is None else on_host(row)

        return {client: place(client, row) for client, row in rows.items()}


@dataclass(frozen=True)
class ClientMemory:
    """What clients remember between rounds. A client that was never selected takes no memory.

    On a GPU it stays there as far as there is room. That of other clients is copied to the host and
    back, without waiting, and what finds no room there either is written to files.
    """

    rows: Mapping[int, Memory] = field(default_factory=ByClient)
    num_examples: int = 0  # held by these clients together, each when it first took part

    def __post_init__(self) -> None:
        if not isinstance(self.rows, ByClient):  # from a checkpoint
            object.__setattr__(self, "rows", ByClient(self.rows))

    def take(
        self, clients: Tensor, first: Callable[[], Memory], device: torch.device
    ) -> list[Memory]:
        """The memory of each of these clients; `first` returns that of a client never selected."""
        if not self.rows:
            return [first()] * len(clients)
        listed = clients.tolist()
        new = {} if all(client in self.rows for client in listed) else first()
        return [moved(self.rows.get(client, new), device) for client in listed]

    def put(
        self, clients: Tensor, keep: Sequence[Memory], sizes: Tensor, room: Room, round: int
    ) -> ClientMemory:
        """With what these clients keep after this round."""
        if not any(keep):
            return self
        assert isinstance(self.rows, ByClient)
        rows = dict(zip(clients.tolist(), keep, strict=True))
        changed = self.rows.changed(room.places(rows, round))
        return ClientMemory(changed, self.num_examples_with(clients, sizes))

    def num_examples_with(self, clients: Tensor, sizes: Tensor) -> int:
        """How many examples are held by the clients that took part so far and by these."""
        seen = dict(zip(clients.tolist(), sizes.tolist(), strict=True))
        new: int = sum(size for client, size in seen.items() if client not in self.rows)
        return self.num_examples + new
