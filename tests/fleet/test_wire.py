"""Tensors on their way: bit by bit what they were, in few bytes, and nothing is taken on trust."""

import pytest
import torch

from fedlens.fleet import payload
from fedlens.fleet.payload import from_wire, to_wire
from fedlens.runs.folder import to_bytes

NAN = torch.tensor([0x7FF8000000000123], dtype=torch.int64).view(torch.float64)
ODD = torch.tensor([-0.0, torch.inf, 1e-310, 1e300, 0.1], dtype=torch.float64)
TENSORS = {
    "doubles that float32 holds": torch.arange(12, dtype=torch.float64).view(3, 4),
    "few others among them": torch.cat([torch.zeros(40, dtype=torch.float64), NAN, ODD]),
    "mostly others": ODD,
    "turned": torch.arange(6, dtype=torch.float64).view(2, 3).T,
    "one": torch.tensor(0.1, dtype=torch.float64),
    "none": torch.zeros((0, 3), dtype=torch.float64),
    "float32": torch.randn(5, generator=torch.Generator().manual_seed(0)),
    "count": torch.tensor([3]),
    "mask": torch.tensor([True, False]),
}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def test_no_bit_is_lost():
    found = from_wire(to_wire(TENSORS))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@pytest.mark.parametrize("wrong", [{"x/a": torch.zeros(1)}, {"0/a": ODD, "00/b": ODD}])
def test_names_without_a_place_of_their_own_are_refused(wrong):
    with pytest.raises(ValueError, match=r"place|invalid"):
        from_wire(to_bytes(wrong))


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, to_wire(TENSORS)[:-1]])
def test_bytes_that_are_no_file_are_refused(content):
    with pytest.raises(ValueError, match="not a file of tensors"):
        from_wire(content)


@pytest.mark.parametrize("arrays", [0, 1, 3])
def test_a_message_has_few_parts_and_its_tensors_in_order(arrays, monkeypatch):
    pytest.importorskip("flwr")
    from fedlens.fleet import messages

    text, content = payload.written({"keys": [1]}, TENSORS)
    monkeypatch.setattr(messages, "SMALL", 0 if arrays else 2**20)
    monkeypatch.setattr(messages, "PIECE", -(-len(content) // max(arrays, 1)))
    message = messages.packed(text, content)
    assert sum(len(message[name]) for name in message.array_records) == arrays
    facts, tensors, *_ = payload.read(*messages.unpacked(message))
    assert facts == {"keys": [1]}
    assert [*tensors] == [*TENSORS]
    empty = messages.packed(*payload.written({}, {}))
    assert payload.read(*messages.unpacked(empty)) == ({}, {}, None, "")
