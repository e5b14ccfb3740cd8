"""What an engine records and replays: the contract of `client.Record`, without a GPU.

A recorded function reads and writes its own memory only. `Replayed` has that in common with a CUDA
graph: it keeps a copy of the inputs, and whatever comes back lies where the first result lay.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch

from fedlens.algorithm import compose
from fedlens.algorithms.admm import fedadmm
from fedlens.algorithms.fedbn import fedbn
from fedlens.client import ClientProgram
from fedlens.engines import Stacked, graphs, stacked
from fedlens.network.network import Network
from fedlens.pieces import Sgd, Uniformly
from fedlens.rounds import RoundInput, begin, run_round, run_rounds
from fedlens.runs.folder import RunFolder
from fedlens.trees import copy_tensors, map_tensors, tensors_in
from fedlens.uploads import Uploads
from fedlens.work import Part
from tests.federations import RAGGED, noisy_images, small_cnn, wide
from tests.papers_under_test import ALGORITHMS, PLAIN


class Replayed:
    def __init__(self) -> None:
        self.seen: Counter[Any] = Counter()
        self.kept: dict[Any, Any] = {}
        self.replays = 0

    def __call__(self, key, function, *inputs):
        shapes = (key, tuple((t.shape, t.dtype) for t in tensors_in(inputs)))
        self.seen[shapes] += 1
        if self.seen[shapes] < graphs.WORTH_IT:
            return None
        if shapes not in self.kept:
            mine = map_tensors(inputs, lambda t: t.detach().clone())
            self.kept[shapes] = [mine, function(*mine), function]
        mine, result, recorded = self.kept[shapes]
        with torch.no_grad():
            copy_tensors(inputs, mine)
        again = recorded(*mine)
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
    replayed = Replayed()
    states = []
    losses: list[list[torch.Tensor]] = [[], []]
    for number, recorder in enumerate((None, replayed)):
        engine = Stacked(network, federation.examples)
        if recorder is not None:
            monkeypatch.setattr(stacked.Stacked, "_recorder", lambda *_, r=recorder: r)
        state = begin(network, program, federation, torch.device("cpu"))
        for _ in range(5):  # at first step by step, then as a whole
            state, outcome = run_round(program, federation, engine, state, seed=0)
            losses[number].append(outcome.train_loss.clone())
        states.append(state)
    assert replayed.replays
    for one, other in zip(*(tensors_in((s.params, s.buffers)) for s in states), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("key", ["lr", "rho"])
def test_a_sweep_in_blocks_records_each_block_for_itself(key, monkeypatch):
    """Factored layers of a block start from models, and step at rates, that others have not."""
    federation = noisy_images([20] * 8)
    network = Network(wide(0.2), dtype=torch.float64)
    numbers = (0.1, 0.2, 0.05, 0.15)
    if key == "rho":
        algorithms = [compose(PLAIN, fedadmm(rho=number)) for number in numbers]
    else:
        algorithms = [replace(PLAIN, solve=Sgd(number)) for number in numbers]
    programs = [ClientProgram(replace(a, select=Uniformly(4)), network.layout) for a in algorithms]
    turns = [
        RoundInput(p, federation, begin(network, p, federation, torch.device("cpu")), seed)
        for seed, p in enumerate(programs)
    ]
    together = ClientProgram.joint(programs, next(iter(turns[0].state.params.values())))
    alone = list(turns)
    for number in range(len(alone)):
        engine = Stacked(network, federation.examples, factor=False)
        for _ in range(5):
            one = alone[number]
            state, _ = run_round(one.program, federation, engine, one.state, one.seed)
            alone[number] = replace(one, state=state)
    recorder = Replayed()
    monkeypatch.setattr(stacked.Stacked, "_recorder", lambda *_: recorder)
    engine = Stacked(network, federation.examples, at_once=8)
    for _ in range(5):
        after = run_rounds(together, engine, turns)
        turns = [replace(turn, state=state) for turn, (state, _) in zip(turns, after, strict=True)]
    assert engine._made and engine._made[2] and recorder.replays
    for turn, expected in zip(turns, alone, strict=True):
        torch.testing.assert_close(turn.state.params, expected.state.params, rtol=1e-10, atol=1e-12)


def test_what_clients_remember_is_found_again_in_whatever_order_a_file_gives_it(
    tmp_path, monkeypatch
):
    federation = noisy_images([16] * 10)
    network = Network(small_cnn("group"), dtype=torch.float64)
    algorithm = replace(compose(PLAIN, fedbn()), select=Uniformly(3))
    program = ClientProgram(algorithm, network.layout)
    state = begin(network, program, federation, torch.device("cpu"))
    for _ in range(3):
        engine = Stacked(network, federation.examples)
        state, _ = run_round(program, federation, engine, state, seed=0)
    folder = RunFolder.create(tmp_path / "run")
    folder.save_state(state)
    load = safetensors.torch.load
    monkeypatch.setattr(
        safetensors.torch, "load", lambda content: dict([*load(content).items()][::-1])
    )
    ends = []
    replayed = Replayed()
    for recorder in (None, replayed):
        monkeypatch.setattr(stacked.Stacked, "_recorder", lambda *_, r=recorder: r)
        engine, after = (
            Stacked(network, federation.examples),
            folder.load_state(torch.device("cpu")),
        )
        for _ in range(11):
            after, _ = run_round(program, federation, engine, after, seed=0)
        ends.append(after)
    rounds = [key for key, _ in replayed.seen if key != "step"]
    assert len(rounds) == 1, "one record does for all clients, loaded or not"
    for name, expected in ends[0].params.items():
        torch.testing.assert_close(ends[1].params[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lent", [True, False])
def test_uploads_are_added_up_and_not_kept_part_by_part(lent):
    """Of parts that lie where others are written to, nothing is left but the sum."""
    uploads, place = Uploads(), {"w": torch.zeros(2)}
    for number in range(3):
        if lent:
            place["w"].fill_(number)
        else:
            place = {"w": torch.full((2,), float(number))}
        one = {"loss": torch.ones(1)}
        uploads.add(Part(place, {}, {"c": place}, [{}], one, True, lent))
    assert not any(part.update or part.extra for part in uploads.parts)
    whole = uploads.whole()
    assert whole.update["w"].tolist() == whole.extra["c"]["w"].tolist() == [3, 3]
    assert len(whole.keep) == len(whole.scalars["loss"]) == 3
