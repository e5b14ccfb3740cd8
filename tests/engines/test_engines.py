"""Every algorithm, every engine: the same numbers."""

import copy
import functools
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from torch import nn

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithms import ALGORITHMS as PAPERS
from fedlens.algorithms.fedavgm import fedavgm
from fedlens.config import names
from fedlens.engines import Sequential
from fedlens.network.network import Network
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from tests.federations import (
    CPU,
    ENGINES,
    FEW,
    RAGGED,
    accuracy,
    assert_equal,
    in_bytes,
    noisy_images,
    small_cnn,
    train,
)
from tests.papers_under_test import ALGORITHMS, AUGMENTS, BASE

ALL_LAYERS, NO_BUFFERS = "batch norm, group norm and dropout", "group norm"
MODELS = {
    ALL_LAYERS: lambda: small_cnn("batch and group", dropout=0.3),
    NO_BUFFERS: lambda: small_cnn("group"),
}
OTHERS = ["stacked", "stacked, two at a time", "processes"]
# Plain, with a pull, with what the server tells, what clients remember, all uploads at once:
OF_EACH_KIND = [
    "fedavg",
    "fedprox",
    "fedir",
    "scaffold",
    "fedadmm",
    "fedbn",
    "median",
    "fedns",
    "fedbuff",
]


def trained(algorithm: str, model: str, engine: str) -> State:
    federation = noisy_images(FEW)
    return train(ALGORITHMS[algorithm], engine, federation=federation, module=MODELS[model]())


@functools.cache
def reference(algorithm: str, model: str) -> State:
    return trained(algorithm, model, "sequential")


# For a quick look, all algorithms side by side, and one of each kind in other ways.
ALL_WAYS = [
    pytest.param(
        name, way, marks=[pytest.mark.slow] if way != "stacked" and name not in OF_EACH_KIND else []
    )
    for name in ALGORITHMS
    for way in OTHERS
]


@pytest.mark.parametrize(("algorithm", "engine"), ALL_WAYS)
def test_engines_agree(algorithm, engine):
    agree(trained(algorithm, ALL_LAYERS, engine), reference(algorithm, ALL_LAYERS))


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("algorithm", OF_EACH_KIND)
def test_engines_agree_on_a_model_without_buffers(algorithm, engine):
    agree(trained(algorithm, NO_BUFFERS, engine), reference(algorithm, NO_BUFFERS))


@pytest.mark.parametrize("engine", ["two devices", "more devices than clients"])
@pytest.mark.parametrize("algorithm", OF_EACH_KIND)
def test_workers_with_devices_of_their_own_agree(algorithm, engine):
    found = trained(algorithm, ALL_LAYERS, f"processes, {engine}")
    agree(found, reference(algorithm, ALL_LAYERS))


def agree(found: State, expected: State) -> None:
    for part in ("params", "buffers"):
        for name, value in getattr(expected, part).items():
            torch.testing.assert_close(getattr(found, part)[name], value, rtol=1e-9, atol=1e-11)
    for kind, tree in expected.told.items():
        for name, value in tree.items():
            torch.testing.assert_close(found.told[kind][name], value, rtol=1e-9, atol=1e-11)
    assert expected.clients.rows.keys() == found.clients.rows.keys()
    for client, row in expected.clients.rows.items():
        for kind, tree in row.items():
            for name, value in tree.items():
                kept = found.clients.rows[client][kind][name]
                torch.testing.assert_close(kept, value, rtol=1e-9, atol=1e-11)


def test_every_engine_can_be_chosen_by_its_name():
    assert set(get_args(names.EngineName)) == {"auto", *names.ENGINES}
    network, examples = Network(small_cnn()), noisy_images(RAGGED).examples
    for name, make in names.ENGINES.items():
        assert make(network, examples, (), (), None).name == name


def test_every_paper_is_under_test():
    tested = {name.split(",")[0].split(" ")[0] for name in ALGORITHMS}
    assert set(PAPERS) <= tested


@functools.cache
def augmented(engine: str, augment: str) -> State:
    floats = noisy_images(FEW)
    federation = in_bytes(floats) if augment == "bytes" else floats
    return train(ALGORITHMS["fedir"], engine, federation=federation, augment=AUGMENTS[augment])


@pytest.mark.parametrize("engine", [*OTHERS, "stacked, recorded"])
@pytest.mark.parametrize("augment", AUGMENTS)
def test_engines_agree_with_augmentation(augment, engine):
    expected, found = augmented("sequential", augment), augmented(engine, augment)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-9, atol=1e-11)


def test_the_number_of_workers_does_not_change_a_bit():
    two = train(BASE, "processes", module=small_cnn("batch"), dtype=torch.float32)
    three = train(BASE, "processes, three workers", module=small_cnn("batch"), dtype=torch.float32)
    assert_equal(found=three.params, expected=two.params)
    assert_equal(found=three.buffers, expected=two.buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_leaves_the_state_it_was_given_as_it_was(dtype):
    federation = noisy_images(FEW)
    network = Network(small_cnn("batch"), dtype=dtype)
    program = ClientProgram(compose(BASE, fedavgm(0.9)), network.layout)
    engine = Sequential(network, federation.examples)
    state, _ = run_round(
        program, federation, engine, begin(network, program, federation, CPU), seed=0
    )
    before = copy.deepcopy((state.params, state.buffers, state.server["velocity"]))
    run_round(program, federation, engine, state, seed=0)
    for found, expected in zip(
        (state.params, state.buffers, state.server["velocity"]), before, strict=True
    ):
        assert_equal(found=found, expected=expected)


def test_an_error_in_a_worker_is_shown():
    @dataclass(frozen=True)
    class Broken:
        def __call__(self, local):
            raise ArithmeticError("the client's own words")

    broken = Algorithm(BASE.select, BASE.draw, BASE.objective.plus(Broken()), BASE.solve)
    with pytest.raises(ValueError, match="ArithmeticError"):
        train(broken, "processes")


@pytest.mark.slow
def test_all_engines_learn():
    federation, module = noisy_images(RAGGED), small_cnn()
    for engine in ENGINES:
        state = train(BASE, engine, rounds=8, federation=federation)
        assert accuracy(module, state, federation) > 0.9, engine


class Own(nn.Module):
    """A module as people write them: in-place layers, a branch on training, sums, odd shapes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.act = nn.LeakyReLU(0.1, inplace=True)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.rows = nn.Flatten(2)
        self.mix = nn.Linear(36, 5)
        self.norm = nn.LayerNorm(5)
        self.flat = nn.Flatten()
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        x = self.relu(1.0 + self.act(self.conv(x)))
        if self.training:
            x = self.drop(x)
        return self.head(self.flat(self.norm(self.mix(self.rows(x)))))


@pytest.mark.parametrize("engine", OTHERS)
def test_engines_agree_on_a_module_as_people_write_them(engine):
    torch.default_generator.manual_seed(0)
    module = Own()
    equal = noisy_images([8] * 8)  # as many clients as examples in a batch
    algorithm = Algorithm(Uniformly(8), Epochs(1, 8), solve=Sgd(0.1))
    expected = train(algorithm, "sequential", federation=equal, module=module)
    found = train(algorithm, engine, federation=equal, module=module)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-9, atol=1e-11)
