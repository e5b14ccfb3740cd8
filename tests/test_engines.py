"""Every algorithm, every engine: the same numbers."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from federations import CPU, ENGINES, RAGGED, accuracy, assert_equal, noisy_images, small_cnn, train
from fedlens.algorithm import Algorithm, compose
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedavgm import fedavgm
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.lambda_sum import lambda_sum
from fedlens.augment import Augment
from fedlens.client import ClientProgram
from fedlens.engines import Sequential
from fedlens.network import Network
from fedlens.pieces import Epochs, Sgd, Uniformly
from fedlens.rounds import begin, run_round

BASE = Algorithm(
    select=Uniformly(5),
    draw=Epochs(2, batch_size=8),
    solve=Sgd(0.1, momentum=0.5, weight_decay=1e-3),
)


@dataclass(frozen=True)
class Median:
    """A combine that needs all uploads at once."""

    linear: ClassVar[bool] = False
    uses_shares: ClassVar[bool] = False

    def __call__(self, updates, shares, cohort, layout):
        return {name: u.median(0).values for name, u in updates.items()}


ALGORITHMS = {
    "fedavg": BASE,
    "fedavg over the population": compose(BASE, fedavg(over="population")),
    "fedprox": compose(BASE, fedprox(0.1)),
    "fedavgm": compose(BASE, fedavgm(0.9)),
    "lambda-sum": compose(BASE, lambda_sum(0.2)),
    "fedprox x fedavgm x lambda-sum": compose(BASE, fedprox(0.1), fedavgm(0.5), lambda_sum(0.1)),
    "a combine that needs all": Algorithm(
        BASE.select, BASE.draw, solve=BASE.solve, combine=Median()
    ),
    "momentum kept between rounds": Algorithm(
        Uniformly(8), Epochs(1, 8), solve=Sgd(0.1, momentum=0.9), reset=False
    ),
}
MODELS = {
    "group norm": lambda: small_cnn("group"),
    "batch norm and dropout": lambda: small_cnn("batch", dropout=0.3),
}
OTHERS = [name for name in ENGINES if name != "sequential"]


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_engines_agree(algorithm, model, engine):
    expected = train(algorithm, "sequential", module=model())
    found = train(algorithm, engine, module=model())
    for part in ("params", "buffers"):
        for name, value in getattr(expected, part).items():
            torch.testing.assert_close(getattr(found, part)[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", OTHERS)
def test_engines_agree_with_augmentation(engine):
    augment = Augment(crop=1, flip=True)
    expected = train(BASE, "sequential", augment=augment)
    found = train(BASE, engine, augment=augment)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", OTHERS)
def test_engines_agree_when_clients_keep_their_own_norm_layers(engine):
    algorithm = Algorithm(Uniformly(6), Epochs(1, 8), solve=Sgd(0.1), personal_norm=True)
    expected = train(algorithm, "sequential", rounds=3, module=small_cnn("batch"))
    found = train(algorithm, engine, rounds=3, module=small_cnn("batch"))
    assert expected.clients.rows.keys() == found.clients.rows.keys()
    for client, row in expected.clients.rows.items():
        for name, value in row["norm"].items():
            torch.testing.assert_close(found.clients.rows[client]["norm"][name], value)


def test_the_number_of_workers_does_not_change_a_bit():
    two = train(BASE, "processes", module=small_cnn("batch"), dtype=torch.float32)
    three = train(BASE, "processes, three workers", module=small_cnn("batch"), dtype=torch.float32)
    assert_equal(found=three.params, expected=two.params)
    assert_equal(found=three.buffers, expected=two.buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_leaves_the_state_it_was_given_as_it_was(dtype):
    federation = noisy_images(RAGGED)
    network = Network(small_cnn("batch"), dtype=dtype)
    program = ClientProgram(compose(BASE, fedavgm(0.9)), network.layout)
    engine = Sequential(network, federation.examples)
    state, _ = run_round(program, federation, engine, begin(network, program, CPU), seed=0)
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
    with pytest.raises(RuntimeError, match="the client's own words"):
        train(broken, "processes")


def test_all_engines_learn():
    federation, module = noisy_images(RAGGED), small_cnn()
    for engine in ENGINES:
        state = train(BASE, engine, rounds=8, federation=federation)
        assert accuracy(module, state, federation) > 0.9, engine
