"""States as files, whatever their fields are."""

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.core import Memory, Tree
from fedlens.rounds import ClientMemory
from fedlens.runs.folder import describe, from_bytes, restore, to_bytes

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Larger:
    """A state with fields that nobody has thought of yet."""

    round: int
    momentum: float
    best: Tree | None
    scale: Tensor
    deep: dict[str, Memory]
    clients: ClientMemory


def test_a_state_may_have_any_fields_of_tensors_and_numbers():
    rows = {k: {"dual": {"w": torch.full((2,), float(k))}} for k in (9, 4)}
    deep = {"a": {"b": {"w": torch.ones(2, 2, dtype=torch.bfloat16)}, "c": {}}}
    saved = Larger(3, 0.9, None, torch.tensor(7), deep, ClientMemory(rows))
    tensors: Tree = {}
    described = json.loads(json.dumps(describe(saved, tensors)))
    assert set(tensors) == {"scale", "deep/a/b/w", "clients/rows/dual/w"}
    loaded = restore(Larger, described, from_bytes(to_bytes(tensors), CPU))
    assert (loaded.round, loaded.momentum, loaded.best) == (3, 0.9, None)
    assert loaded.scale == 7
    assert loaded.deep["a"]["b"]["w"].dtype == torch.bfloat16
    assert loaded.deep["a"]["c"] == {}
    assert list(loaded.clients.rows) == [9, 4]
    for client, memory in rows.items():
        assert torch.equal(loaded.clients.rows[client]["dual"]["w"], memory["dual"]["w"])
