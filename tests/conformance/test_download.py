"""The way down in few bits: what clients hold follows the server's model."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from fedlens.algorithm import compose
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedbuff import fedbuff
from fedlens.algorithms.quantize import Quantize, download
from fedlens.algorithms.top_k import TopK
from fedlens.network.layout import Layout
from fedlens.rounds.download import HELD, followed, held, sent_next
from tests.conformance.test_channel import rounds
from tests.papers_under_test import BASE

LAYOUT = Layout.of(torch.nn.Linear(40, 10))


def models(count):
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (10, 40), "bias": (10,)}
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    steps = [
        {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for _ in range(count)
    ]
    found = [whole]
    for step in steps:
        found.append({name: found[-1][name] + step[name] for name in shapes})
    return found


def follow(steps, path):
    """The states of the way down while the server takes this path."""
    state: dict[str, Any] = {}
    found = []
    for round, (before, after) in enumerate(pairwise(path)):
        start = held(state, before)
        state = sent_next(steps, state, before, after, torch.arange(3), LAYOUT, 7, round)
        had = followed(steps, start, state["difference"])
        assert all(torch.equal(had[name], state[HELD][name]) for name in had)  # to the bit
        found.append(state)
    return found


def test_clients_and_server_make_the_same_of_what_is_sent_and_never_drift_apart():
    """|x - h| is at most a step of the last difference, whatever came before."""
    path = models(30)
    states = follow((Quantize(8),), path)
    for after, state in zip(path[1:], states, strict=True):
        for name, tensor in after.items():
            scale = state["difference"][name]["0.scale"]
            assert float((tensor - state[HELD][name]).abs().max()) <= 1.01 * float(scale) / 127


def test_what_is_left_out_comes_later():
    """A model that stands still is reached, though a tenth of its entries are sent at a time."""
    first, last = models(1)
    states = follow((TopK(0.1),), [first, *[last] * 10])
    for name, tensor in last.items():
        torch.testing.assert_close(states[-1][HELD][name], tensor, rtol=0, atol=1e-7)
        sent = states[0]["difference"][name]["0.places"]
        assert len(sent) == tensor.numel() / 10


def test_a_server_that_does_not_move_sends_zeros():
    (one,) = models(0)
    (state,) = follow((Quantize(4),), [one, one])
    assert all(torch.equal(state[HELD][name], one[name]) for name in one)


def test_the_server_keeps_its_own_model_exact():
    """With one round nothing was rounded yet; from then on clients train from what they hold."""
    plain, _ = rounds(compose(BASE, fedavg()))
    first, _ = rounds(compose(BASE, download(bits=2)))
    assert all(torch.equal(p, first.params[name]) for name, p in plain.params.items())
    coarse, _ = rounds(compose(BASE, download(bits=2)), 3)
    fine, _ = rounds(compose(BASE, download(bits=16)), 3)
    plain, _ = rounds(compose(BASE, fedavg()), 3)

    def apart(state):
        pairs = ((p, state.params[name]) for name, p in plain.params.items())
        return max(float((a - b).abs().max()) for a, b in pairs)

    assert 0 < apart(fine) < 1e-3 < apart(coarse)


def test_bytes_are_those_of_the_difference_for_those_who_had_the_model():
    state, first = rounds(compose(BASE, download(bits=8)))
    count, tensors = sum(p.numel() for p in state.params.values()), len(state.params)
    assert first.bytes_down == 5 * 4 * count
    after, second = rounds(compose(BASE, download(bits=8)), 2)
    again = len({*first.clients} & {*second.clients})
    assert 0 < again < 5
    assert second.bytes_down == again * (count + 4 * tensors) + (5 - again) * 4 * count
    assert sorted(after.download["have"]["clients"].tolist()) == sorted(second.clients)


def test_what_is_no_difference_is_refused():
    first, last = models(1)
    (state,) = follow((Quantize(8),), [first, last])
    sent = state["difference"]
    with pytest.raises(ValueError, match="other tensors"):
        followed((Quantize(8),), first, {"weight": sent["weight"]})
    with pytest.raises(ValueError, match=r"."):
        followed((Quantize(8),), first, sent | {"weight": sent["bias"]})


def test_asynchronous_rounds_and_too_many_bits_are_refused():
    with pytest.raises(ValueError, match="leave one out"):
        compose(BASE, fedbuff(buffer=3), download())
    with pytest.raises(ValueError, match="download: bits is 17: choose 2 to 16"):
        download(bits=17).amend(BASE)
