"""What a site remembers of an experiment, in its own folder, in two steps.

What a client keeps of an order is written before its update leaves, under the order's key. It
counts from when the server says that the update did: the next order names the key of the last one
that counted. So a client whose update came too late, or was not taken, goes on from what it
remembered before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedlens.core import Memory
from fedlens.files import write_atomically
from fedlens.fleet.payload import flat, nested
from fedlens.fleet.policy import Refused
from fedlens.runs.checkpoint import from_bytes, to_bytes
from fedlens.trees import in_order


@dataclass(frozen=True)
class SiteMemory:
    folder: Path

    def read(self, counted: int | None) -> Memory | None:
        """What it remembers of the order that counted last; None: none has counted."""
        if counted is None:
            return None
        path = self._path(counted)
        if not path.is_file():
            raise Refused("it has lost what it remembers of this experiment")
        memory: Memory = in_order(nested(from_bytes(path.read_bytes(), torch.device("cpu"))))
        return memory

    def settle(self, counted: int | None) -> None:
        """Drop what is of other orders than the one that counted last."""
        kept = None if counted is None else self._path(counted)
        for path in self.folder.glob("*.safetensors"):
            if path != kept:
                path.unlink(missing_ok=True)

    def write(self, key: int, memory: Memory) -> None:
        write_atomically(self._path(key), to_bytes(flat(memory)))

    def _path(self, key: int) -> Path:
        return self.folder / f"{key % 2**64:016x}.safetensors"
