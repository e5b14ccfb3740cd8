"""A round costs what its cohort costs, however many clients there are; each draws by its keys."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Poisson, Uniformly
from fedlens.algorithm.slots import Penalty
from fedlens.algorithms.admm import admm, fedadmm
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedavgm import fedavgm
from fedlens.core import Local, keys
from fedlens.core.federation import Federation, Holdings, Split
from fedlens.core.trees import map_tensors
from fedlens.engines import Sequential, Stacked
from fedlens.engines.graphs import Captures
from fedlens.network.network import Network
from fedlens.rounds import State, begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.client_memory import Room
from tests.counting import Operations
from tests.federations import CPU, RAGGED, assert_equal, noisy_images, small_cnn, train
from tests.papers_under_test import ALGORITHMS, PLAIN


@dataclass(frozen=True)
class Watched:
    """A split that notes whose holdings it was asked for, and how often for all sizes."""

    inner: Split
    asked: list[int] = field(default_factory=list)
    sized: list[int] = field(default_factory=list)

    @property
    def num_clients(self) -> int:
        return self.inner.num_clients

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        self.asked.append(len(cohort))
        return self.inner.holdings(round, cohort)

    def sizes(self, round: int) -> Tensor:
        self.sized.append(round)
        return self.inner.sizes(round)


def rounds(algorithm: Algorithm, number: int = 3) -> tuple[State, Watched]:
    images, network = noisy_images(RAGGED), Network(small_cnn(), dtype=torch.float64)
    split = Watched(images.split)
    federation = Federation(images.examples, images.num_classes, split)
    program = ClientProgram(replace(algorithm, select=Uniformly(3)), network.layout)
    engine = Sequential(network, federation.examples)
    state = begin(network, program, federation, CPU)
    for _ in range(number):
        state, _ = run_round(program, federation, engine, state, seed=0)
    return state, split


def test_holdings_are_those_of_the_cohort_and_sizes_of_all_are_not_asked_for():
    _, split = rounds(PLAIN)
    assert (split.asked, split.sized) == ([3, 3, 3], [])


@pytest.mark.parametrize("paper", [fedavg(over="population"), admm(rho=0.1)])
def test_shares_of_the_population_ask_for_sizes_alone(paper):
    _, split = rounds(compose(PLAIN, paper))
    assert (split.asked, split.sized) == ([3, 3, 3], [0, 1, 2])


def test_the_examples_of_clients_seen_are_counted_as_they_come():
    state, split = rounds(compose(PLAIN, fedadmm(rho=0.1)), 4)
    assert split.sized == []
    seen = sorted(state.clients.rows)
    assert state.clients.num_examples == sum(RAGGED[client] for client in seen)
    assert 3 < len(seen) < 10


@dataclass(frozen=True)
class Drawing(Penalty):
    """Nothing: it notes what it could draw by, under two names."""

    drawn: list[int] = field(default_factory=list)

    def __call__(self, local: Local) -> Tensor:  # [C]
        self.drawn.extend([*local.key("one").tolist(), *local.key("other").tolist()])
        return torch.zeros(len(local.steps), dtype=torch.float64)


def test_clients_have_another_key_in_every_step_and_round_for_every_name():
    noted = [Drawing(), Drawing()]
    for drawing in noted:
        rounds(replace(PLAIN, objective=PLAIN.objective.plus(drawing)), 2)
    first, again = (drawing.drawn for drawing in noted)
    assert first == again and len(first) > 2 * 2 * 3
    assert len(set(first)) == len(first)


class Still:
    """A `graphs.Capture` that computes its function once, and nothing when it is replayed."""

    def __init__(self, function: Callable[..., Any], inputs: Any, pool: Any) -> None:
        self.result = function(*inputs)

    def replay(self) -> None:
        pass


def num_operations(num_layers: int) -> int:
    """Of a recorded round, what the host launches beside the clients' part."""
    hidden = [layer for _ in range(num_layers) for layer in (nn.Linear(6, 6), nn.ReLU())]
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), *hidden, nn.Linear(6, 4))
    images, network = noisy_images([8] * 4), Network(module, dtype=torch.float64)
    program = ClientProgram(compose(PLAIN, fedavgm()), network.layout)
    engine = Stacked(
        network, images.examples, make_recorder=lambda: Captures(make=cast(Any, Still))
    )
    state = begin(network, program, images, CPU)
    for _ in range(4):  # recorded in the third
        with (seen := Operations()):
            state, _ = run_round(program, images, engine, state, seed=0)
    return seen.count


def test_a_server_takes_as_many_kernels_for_many_tensors_as_for_few():
    assert num_operations(num_layers=8) == num_operations(num_layers=1)


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "scaffold", "median", "clip", "top-k"])
def test_a_round_in_which_nobody_takes_part_leaves_the_model_as_it_is(name, engine):
    nobody = replace(ALGORITHMS[name], select=Poisson(0.0, 10))
    start = Network(small_cnn(), dtype=torch.float64).params
    assert_equal(found=train(nobody, engine).params, expected=start)


def test_poisson_sampling_takes_each_client_on_its_own():
    federation, rounds = noisy_images([1] * 200), 300
    chosen = [Poisson(0.1, 200)(federation, 0, keys.root(round)) for round in range(rounds)]
    sizes = torch.tensor([len(one) for one in chosen]).double()
    # A binomial's mean is 20 and its variance 18; the bounds are five standard errors wide.
    assert abs(float(sizes.mean()) - 20) < 5 * (18 / rounds) ** 0.5
    assert (
        18 * (1 - 5 * (2 / rounds) ** 0.5) < float(sizes.var()) < 18 * (1 + 5 * (2 / rounds) ** 0.5)
    )
    assert all(torch.equal(one, one.unique()) for one in chosen)


def test_a_few_clients_by_chance_are_those_clients_and_nobody_else():
    chance = replace(ALGORITHMS["fedavg"], select=Poisson(0.3, 10))
    one, other = train(chance, rounds=4), train(chance, "stacked", rounds=4)
    for name, p in one.params.items():
        torch.testing.assert_close(other.params[name], p)


@pytest.mark.parametrize("room", [0.5, 5.5])
def test_what_clients_remember_goes_to_the_host_if_there_is_no_room_and_changes_nothing(
    room, monkeypatch
):
    algorithm, went = compose(PLAIN, fedadmm()), []
    plain, _ = rounds(algorithm)
    row = plain.clients.rows[next(iter(plain.clients.rows))]
    each = sum(t.nbytes for tree in row.values() for t in tree.values())

    def on_host(memory):
        went.append(memory)
        return map_tensors(memory, torch.clone)

    monkeypatch.setattr("fedlens.rounds.client_memory.on_host", on_host)
    monkeypatch.setattr(Room, "on", lambda *_: Room(gpu=int(room * each)))
    state, split = rounds(algorithm)
    assert_equal(state.params, plain.params)
    for client, memory in plain.clients.rows.items():
        for part, tree in memory.items():
            assert_equal(state.clients.rows[client][part], tree)
    of_all = len(went) / sum(split.asked)
    assert of_all == 1 if room < 1 else 0 < of_all < 1
