"""A site's memory of an experiment, in its own folder, written in two steps.

The memory after an order is written before the update is sent, under the order's key. It becomes
valid when the server has used the update: the next order names the key of the last order that
counted. So a client whose update was late or rejected continues from its memory before that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedlens.core import Memory
from fedlens.core.trees import in_order
from fedlens.fleet.payload import flat, nested
from fedlens.fleet.policy import Refused
from fedlens.runs.checkpoint import from_bytes, to_bytes
from fedlens.storage.files import write_atomically


@dataclass(frozen=True)
class SiteMemory:
    folder: Path

    def read(self, counted: int | None) -> Memory | None:
        """The memory after the last order that counted, or None if none has counted."""
        if counted is None:
            return None
        path = self._path(counted) if type(counted) is int else None
        if path is None or not path.is_file():
            raise Refused("it has lost what it remembers of this experiment")
        memory: Memory = in_order(nested(from_bytes(path.read_bytes(), torch.device("cpu"))))
        return memory

    def settle(self, counted: int | None) -> None:
        """Delete the memory of all orders except the last that counted."""
        kept = None if counted is None else self._path(counted)
        for path in self.folder.glob("*.safetensors"):
            if path != kept:
                path.unlink(missing_ok=True)

    def write(self, key: int, memory: Memory) -> None:
        write_atomically(self._path(key), to_bytes(flat(memory)))

    def _path(self, key: int) -> Path:
        return self.folder / f"{key % 2**64:016x}.safetensors"
