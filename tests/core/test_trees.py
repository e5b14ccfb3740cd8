"""Tensors in dicts, records and lists."""

import torch

from fedlens.core.trees import converted, copies, stack, tensors_in, unstack
from fedlens.engines.processes import SharedBuffer
from fedlens.engines.workers import num_bytes


def some_rows():
    return [
        {"a": {"w": torch.randn(3, 2), "on": torch.tensor([True, False])}, "n": torch.tensor(row)}
        for row in range(4)
    ]


def test_rows_stack_to_one_and_come_apart_again():
    rows = some_rows()
    whole = stack(rows)
    assert whole["a"]["w"].shape == (4, 3, 2)
    for row, other in zip(rows, unstack(whole, 4), strict=True):
        for one, two in zip(tensors_in(row), tensors_in(other), strict=True):
            assert one.dtype == two.dtype and torch.equal(one, two)


def test_what_was_taken_apart_is_stacked_without_a_copy_in_its_own_order_only():
    whole = {"w": torch.randn(4, 3)}
    rows = unstack(whole, 4)
    assert stack(rows)["w"] is whole["w"]
    for other in (rows[::-1], rows[:3], [*rows[:3], rows[0]]):
        again = stack(other)["w"]
        assert again.data_ptr() != whole["w"].data_ptr()
        assert torch.equal(again, torch.stack([row["w"] for row in other]))
    square = torch.randn(2, 3, 3)
    turned = [{"w": square[0].T}, {"w": square[1].T}]
    assert torch.equal(stack(turned)["w"], square.transpose(1, 2)), "they lie otherwise"
    number = torch.tensor(3.0)
    assert stack([{"w": number[None]}, {"w": number[None]}])["w"].shape == (2, 1)
    assert stack([]) == {}


def test_copies_are_of_the_same_kind_and_share_nothing():
    rows = some_rows()
    for one, other in zip(tensors_in(rows), tensors_in(copies(rows)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()


def test_converted_tensors_are_new_even_if_they_were_of_that_dtype():
    given = {"w": torch.randn(2, 3).T, "v": torch.randn(4, dtype=torch.float64)}
    made = converted(given, torch.float64)
    for name, tensor in given.items():
        assert made[name].dtype is torch.float64 and torch.equal(made[name], tensor.double())
        assert made[name].data_ptr() != tensor.data_ptr()


def test_a_value_passes_through_shared_memory_as_it_is_whether_all_of_it_fits_or_not():
    whole = {"rows": some_rows(), "at": (slice(1, 2), torch.randn(3, 4).T), "none": torch.empty(0)}
    for size in (2**20, 4096):
        value = {**whole, "large": torch.randn(1000)}
        buffer = SharedBuffer(size)
        written = buffer.write(value, after=64)
        left = tensors_in(written.value)
        assert len(left) == (size < 2**20) and written.end == 64 + num_bytes(value)
        found = buffer.read(written.value)
        assert found["at"][0] == slice(1, 2)
        for one, two in zip(tensors_in(found), tensors_in(value), strict=True):
            assert one.dtype == two.dtype and torch.equal(one, two)
