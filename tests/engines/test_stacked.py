"""Blocks of clients, and factored layers: what `stacked` does to save memory and time."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithm.slots import Combine
from fedlens.engines import Sequential, Stacked, stacked
from fedlens.engines.graphs import Captures
from fedlens.network.network import Network
from fedlens.rounds import RoundInput, begin, run_round, run_rounds
from fedlens.rounds.client import ClientProgram
from tests.eager_capture import EagerCapture
from tests.factoring import factoring, has_factored
from tests.federations import FEW, noisy_images, small_cnn, wide
from tests.papers_under_test import ALGORITHMS

CPU = torch.device("cpu")


def after(engine, network, program, federation, rounds=3, seed=0):
    state = begin(network, program, federation, CPU)
    for _ in range(rounds):
        state, _ = run_round(program, federation, engine, state, seed=seed)
    return state


def assert_same(one, other):
    for name, value in (one.params | one.buffers).items():
        found = (other.params | other.buffers)[name]
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)


class Cramped(Stacked):
    """There is room for `room` clients at once and no more."""

    room = 3

    def _train_block(self, prepared, shared, work):
        if len(work) > self.room:
            raise torch.OutOfMemoryError("no room")
        return super()._train_block(prepared, shared, work)


def test_too_large_blocks_are_halved_and_the_result_is_the_same():
    federation = noisy_images(FEW)
    network = Network(small_cnn("group"), dtype=torch.float64)
    program = ClientProgram(ALGORITHMS["fedavg"], network.layout)
    cramped = Cramped(network, federation.examples)
    expected = after(Sequential(network, federation.examples), network, program, federation)
    assert_same(expected, after(cramped, network, program, federation))
    assert cramped.at_once <= 3


def test_recordings_are_dropped_before_blocks_are_halved():
    federation = noisy_images([16] * 8)
    network = Network(small_cnn("group"), dtype=torch.float64)
    program = ClientProgram(ALGORITHMS["fedavg"], network.layout)
    made: list[Captures] = []

    def make() -> Captures:
        made.append(Captures(EagerCapture))
        return made[-1]

    class Filling(Stacked):
        """There is no room beside the recordings of a whole round."""

        def _train_block(self, prepared, shared, work):
            parts = super()._train_block(prepared, shared, work)
            if any(key[0] == "round" for key, _ in prepared.recorder._captured):
                raise torch.OutOfMemoryError("no room")
            return parts

    engine = Filling(network, federation.examples, make_recorder=make)
    expected = after(Sequential(network, federation.examples), network, program, federation, 7)
    assert_same(expected, after(engine, network, program, federation, 7))
    assert len(made) > 1 and engine.at_once == stacked.AT_ONCE


def test_memory_that_does_not_do_for_one_client_is_an_error():
    federation = noisy_images(FEW)
    network = Network(small_cnn("group"), dtype=torch.float64)
    program = ClientProgram(ALGORITHMS["fedavg"], network.layout)
    cramped = Cramped(network, federation.examples)
    cramped.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        after(cramped, network, program, federation)


def test_padding_is_what_fills_up_shorter_batches_and_nothing_else():
    network = Network(small_cnn("group"), dtype=torch.float64)
    program = ClientProgram(
        replace(ALGORITHMS["fedavg"], select=Uniformly(2), draw=Epochs(1, batch_size=10)),
        network.layout,
    )
    for sizes, share in (([20, 20], 0.0), ([40, 20], 0.0), ([15, 20], 1 - 35 / 40)):
        federation = noisy_images(sizes)
        engine = Stacked(network, federation.examples)
        after(engine, network, program, federation, rounds=1)
        assert engine.padding_share == pytest.approx(share)


def plain(name: str) -> Algorithm:
    """An algorithm whose clients descend without momentum."""
    algorithm, step = ALGORITHMS[name], Sgd(0.1)
    solve: Any = algorithm.solve
    solve = replace(solve, inner=step) if "admm" in name else step
    return replace(algorithm, solve=solve)


FACTORED = "fedavg, fedir, fedprox, fedns, median, lastfc, admm, fedadmm"


@pytest.mark.parametrize("name", [*FACTORED.split(", "), "privacy by an adaptive clip"])
@pytest.mark.parametrize("sizes", [[16] * 8, FEW], ids=["equal", "ragged"])
def test_factored_layers_give_what_the_weights_themselves_give(name, sizes):
    federation = noisy_images(sizes)
    network = Network(wide(0.2), dtype=torch.float64)
    program = ClientProgram(plain(name), network.layout)
    ends = []
    for factor in (False, True):
        engine = Stacked(network, federation.examples, at_once=3)
        with factoring(factor):
            ends.append(after(engine, network, program, federation))
        assert has_factored(engine) is factor
    assert_same(*ends)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "median"])
@pytest.mark.parametrize("at_once", [64, 8], ids=["one block", "blocks of one and two"])
@pytest.mark.parametrize("sizes", [[20] * 8, FEW], ids=["equal", "ragged, one by one"])
def test_factored_layers_of_a_sweep_give_what_each_experiment_gives_alone(
    name, at_once, sizes, monkeypatch
):
    monkeypatch.setattr("fedlens.engines.factored.LARGE", 1)
    federation = noisy_images(sizes)
    network = Network(wide(0.2), dtype=torch.float64)
    base = replace(ALGORITHMS[name], select=Uniformly(4))
    programs = [
        ClientProgram(replace(base, solve=Sgd(lr)), network.layout) for lr in (0.1, 0.2, 0.05)
    ]
    turns = [
        RoundInput(program, federation, begin(network, program, federation, CPU), seed)
        for seed, program in enumerate(programs)
    ]
    together = ClientProgram.joint(programs, next(iter(turns[0].state.params.values())))
    engine = Stacked(network, federation.examples, at_once=at_once)
    for _ in range(3):
        after_round = run_rounds(together, engine, turns)
        turns = [replace(t, state=state) for t, (state, _) in zip(turns, after_round, strict=True)]
    assert has_factored(engine)
    for seed, (turn, program) in enumerate(zip(turns, programs, strict=True)):
        alone = Stacked(network, federation.examples)
        with factoring(False):
            assert_same(after(alone, network, program, federation, seed=seed), turn.state)


@pytest.mark.parametrize("name", ["fedadmm", "scaffold", "feddyn"])
def test_layers_are_not_factored_where_it_would_not_hold(name):
    federation = noisy_images([20] * 8)
    network = Network(wide(0.0), dtype=torch.float64)
    program = ClientProgram(ALGORITHMS[name], network.layout)
    engine = Stacked(network, federation.examples)
    after(engine, network, program, federation, rounds=1)
    assert not has_factored(engine)


@dataclass(frozen=True)
class SumThatSays(Combine):
    """Someone's own weighted sum."""

    sums_params: ClassVar[bool]
    linear: ClassVar[bool] = True

    def __call__(self, updates, shares, cohort, layout):
        return {name: torch.tensordot(shares.to(u), u, dims=1) for name, u in updates.items()}


@dataclass(frozen=True)
class Declared(SumThatSays):
    sums_params: ClassVar[bool] = True


@dataclass(frozen=True)
class Silent(SumThatSays):
    sums_params: ClassVar[bool] = False


def test_a_combine_that_says_that_it_sums_is_spared_the_matrices():
    federation = noisy_images(FEW)
    network = Network(wide(0.2), dtype=torch.float64)
    ends = []
    for combine in (Silent(), Declared()):
        program = ClientProgram(replace(plain("fedavg"), combine=combine), network.layout)
        engine = Stacked(network, federation.examples)
        ends.append(after(engine, network, program, federation))
        assert engine._prepared is not None
        (form,) = engine._prepared.forms.values()
        assert form.sums_uploads is combine.sums_params
    assert_same(*ends)


def test_a_small_matrix_is_not_factored():
    federation = noisy_images([70] * 8)
    network = Network(small_cnn("group"), dtype=torch.float64)
    program = ClientProgram(ALGORITHMS["fedavg"], network.layout)
    engine = Stacked(network, federation.examples)
    after(engine, network, program, federation, rounds=1)
    assert not has_factored(engine)
