"""What an engine records and replays: the contract of `client.Record`, without a GPU.

A recorded function reads and writes its own memory only. `Replayed` has that in common with a CUDA
graph: it keeps a copy of the inputs, and whatever comes back lies where the first result lay.
"""

from collections import Counter

import pytest
import torch

from federations import RAGGED, noisy_images, small_cnn
from fedlens.client import ClientProgram
from fedlens.engines import Stacked, graphs, stacked
from fedlens.network import Network
from fedlens.rounds import begin, run_round
from fedlens.trees import copy_tensors, map_tensors, tensors_in
from papers_under_test import ALGORITHMS


class Replayed:
    def __init__(self):
        self.seen, self.kept, self.replays = Counter(), {}, 0

    def __call__(self, key, function, *inputs):
        shapes = (key, tuple((t.shape, t.dtype) for t in tensors_in(inputs)))
        self.seen[shapes] += 1
        if self.seen[shapes] < graphs.WORTH_IT:
            return None
        if shapes not in self.kept:
            mine = map_tensors(inputs, lambda t: t.detach().clone())
            self.kept[shapes] = [mine, function(*mine)]
        mine, result = self.kept[shapes]
        with torch.no_grad():
            copy_tensors(inputs, mine)
        again = function(*mine)
        with torch.no_grad():
            copy_tensors(again, result)
        self.replays += 1
        return result


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("sizes", [[30] * 10, RAGGED], ids=["equal", "ragged"])
def test_recorded_rounds_are_the_same(name, sizes, monkeypatch):
    federation = noisy_images(sizes)
    network = Network(small_cnn("group", dropout=0.3), dtype=torch.float64)
    program = ClientProgram(ALGORITHMS[name], network.layout)
    states = []
    for recorder in (None, Replayed()):
        engine = Stacked(network, federation.examples)
        if recorder is not None:
            monkeypatch.setattr(stacked.Stacked, "_recorder", lambda *_, r=recorder: r)
        state = begin(network, program, federation, torch.device("cpu"))
        for _ in range(5):  # at first step by step, then as a whole
            state, _ = run_round(program, federation, engine, state, seed=0)
        states.append(state)
    assert recorder.replays
    for one, other in zip(*(tensors_in((s.params, s.buffers)) for s in states), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
