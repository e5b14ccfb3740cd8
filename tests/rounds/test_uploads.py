"""What clients send is added up to the same bits, whoever adds up which part of it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlens.engines.workers import paired_blocks
from fedlens.rounds.uploads import Uploads
from fedlens.rounds.work import Part


def sent_by(client: int) -> Part:
    numbers = torch.randn(4, generator=torch.Generator().manual_seed(client), dtype=torch.float64)
    update = {"w": numbers * 10.0**client}
    return Part(update, {}, {"c": update}, [{}], {"loss": torch.ones(1)}, True, borrowed=True)


def added(parts: list[Part]) -> Part:
    uploads = Uploads()
    for part in parts:
        uploads.add(part)
    return uploads.whole()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.floats(0, 100), st.integers(1, 40))
def test_blocks_added_up_where_they_are_trained_come_to_the_same_bits(costs, most_cost, most):
    blocks = paired_blocks(costs, most_cost, most)
    clients = [client for block in blocks for client in range(len(costs))[block]]
    assert clients == list(range(len(costs)))
    for block in blocks:
        size = block.stop - block.start
        assert size == 1 or (size <= most and sum(costs[block]) <= most_cost + 1e-9)
    expected = added([sent_by(client) for client in clients])
    found = added([added([sent_by(c) for c in range(b.start, b.stop)]) for b in blocks])
    assert torch.equal(found.update["w"], expected.update["w"])
    assert torch.equal(found.extra["c"]["w"], expected.extra["c"]["w"])


def test_few_sums_are_kept_at_a_time():
    uploads = Uploads()
    for client in range(100):
        uploads.add(sent_by(0))
        assert len(uploads.sums) <= (client + 1).bit_length()
