"""Tensors on their way: bit by bit what they were, in few bytes, and nothing is taken on trust."""

import pytest
import torch

from fedlens.fleet.payload import from_wire, to_wire
from fedlens.runs.checkpoint import to_bytes

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


def test_an_update_takes_little_more_than_its_float32_would():
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(10_000, generator=draw) * 0.05
    after = before + torch.randn(10_000, generator=draw) * 1e-3
    update = after.double() - before.double()
    assert (update.float().double() != update).any()
    content = to_wire({"update": update})
    assert len(content) < 1.2 * 4 * 10_000
    assert bits(from_wire(content)["update"]) == bits(update)


SHORT = {
    "0/x/short": torch.zeros(4),
    "0/x/at": torch.tensor([1], dtype=torch.int32),
    "0/x/long": torch.tensor([0.1], dtype=torch.float64),
}
WRONG = {
    "a place before the first": {"0/x/at": torch.tensor([-1], dtype=torch.int32)},
    "a place after the last": {"0/x/at": torch.tensor([4], dtype=torch.int32)},
    "places that are no integers": {"0/x/at": torch.tensor([1.0])},
    "more values than places": {"0/x/long": torch.zeros(2, dtype=torch.float64)},
    "values in float32": {"0/x/long": torch.tensor([0.1])},
    "twice the same": {"0/x/whole": torch.zeros(4)},
    "integers": {"0/x/short": torch.zeros(4, dtype=torch.int64)},
    "no place": {"x/whole": torch.zeros(4)},
    "no kind": {"0/x": torch.zeros(4)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_parts_that_do_not_fit_are_refused(wrong):
    assert from_wire(to_bytes(SHORT))["x"].tolist() == [0.0, 0.1, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"a tensor|invalid"):
        from_wire(to_bytes(SHORT | WRONG[wrong]))


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, to_wire(TENSORS)[:-1]])
def test_bytes_that_are_no_file_are_refused(content):
    with pytest.raises(ValueError, match="not a file of tensors"):
        from_wire(content)


def test_a_message_has_one_array_and_its_tensors_in_order():
    pytest.importorskip("flwr")
    from fedlens.fleet.apps import as_record, packed, unpacked

    message = packed({"keys": [1]}, as_record(TENSORS))
    assert [len(message[name]) for name in message.array_records] == [1]
    facts, tensors, *_ = unpacked(message)
    assert facts == {"keys": [1]}
    assert [*tensors] == [*TENSORS]
    assert unpacked(packed({}, None)) == ({}, {}, None, "")
