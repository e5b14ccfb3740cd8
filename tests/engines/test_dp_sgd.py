"""Steps that protect single examples, on every engine: the same numbers."""

import functools

import pytest
import torch
from torch import Tensor, nn

from fedlens.core.trees import copy_tensors
from fedlens.engines import Sequential
from fedlens.network.network import Network
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from tests import side_by_side
from tests.engines.test_engines import agree
from tests.federations import CPU, FEW, RAGGED, assert_equal, noisy_images, small_cnn, train
from tests.papers_under_test import PRIVATE

OTHERS = ["stacked", "stacked, two at a time", "stacked, recorded", "processes"]


class Unread(nn.Module):
    """A module that is not read layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.conv, self.drop, self.last = nn.Conv2d(1, 4, 3), nn.Dropout(0.3), nn.Linear(144, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.drop(self.conv(x).tanh().reshape(len(x), -1)))
        return logits


MODELS = {"layers": lambda: small_cnn("group", dropout=0.3), "not read": Unread}


@functools.cache
def trained(
    algorithm: str, engine: str, model: str = "layers", sizes: tuple[int, ...] = ()
) -> State:
    federation = noisy_images(list(sizes) or FEW)
    return train(PRIVATE[algorithm], engine, 3, federation, MODELS[model]())


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("algorithm", PRIVATE)
def test_engines_agree(algorithm, engine):
    agree(trained(algorithm, engine), trained(algorithm, "sequential"))


@pytest.mark.parametrize("engine", ["processes, two devices", *OTHERS])
def test_engines_agree_on_a_module_that_is_not_read(engine):
    some = "momentum and weight decay", engine, "not read"
    agree(trained(*some), trained(some[0], "sequential", "not read"))


@pytest.mark.parametrize("engine", OTHERS)
def test_engines_agree_on_clients_that_hold_one_example_or_none(engine):
    sizes = (0, 1, 30, 2, 1, 9)
    found = trained("fedprox", engine, sizes=sizes)
    agree(found, trained("fedprox", "sequential", sizes=sizes))


def test_processes_and_one_process_agree_to_the_bit():
    one, two = (
        train(PRIVATE["fedprox"], engine, dtype=torch.float32)
        for engine in ("processes", "processes, three workers")
    )
    assert_equal(found=two.params, expected=one.params)


@pytest.mark.parametrize("engine", ["stacked", "stacked, recorded"])
def test_experiments_side_by_side_have_their_own_clip_and_noise(engine):
    turns = side_by_side.points(PRIVATE["fedprox"], "group")
    together, _ = side_by_side.train(engine, "group", turns)
    for turn, found in zip(turns, together, strict=True):
        agree(found, side_by_side.train("sequential", "group", [turn])[0][0])


def test_a_round_from_a_saved_state_is_the_same_to_the_byte():
    federation = noisy_images(RAGGED)
    network = Network(small_cnn(), dtype=torch.float32)
    program = ClientProgram(PRIVATE["clipped, by adamw that is kept"], network.layout)
    engine = Sequential(network, federation.examples)
    state = begin(network, program, federation, CPU)
    state, _ = run_round(program, federation, engine, state, seed=3)
    saved = {name: torch.empty_like(p) for name, p in state.params.items()}
    copy_tensors(state.params, saved)
    first, _ = run_round(program, federation, engine, state, seed=3)
    again, _ = run_round(program, federation, engine, state, seed=3)
    assert_equal(found=state.params, expected=saved)
    assert_equal(found=again.params, expected=first.params)
