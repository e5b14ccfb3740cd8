"""FedBuff and FedAsync: what they reduce to, and their steps worked out by hand."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithm import compose
from fedlens.algorithm.pieces import ByExamples, Epochs, Equally, Sgd, Uniformly
from fedlens.algorithm.slots import Select
from fedlens.algorithms import fedasync, fedavgm, fedbn, fedbuff, fedvc, median, scaffold
from fedlens.algorithms.fedasync import Mixed
from fedlens.algorithms.fedbuff import Fading
from fedlens.core import Cohort, keys
from fedlens.core.federation import Federation
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.devices import Devices, alike, synthetic
from fedlens.rounds.reports import Clock, Faults, Reporting
from tests.federations import CPU, ENGINES, assert_equal, noisy_images, small_cnn
from tests.papers_under_test import BASE

KEY = keys.root(0)
EQUAL = [12] * 10


def play(algorithm, rounds, clock=None, sizes=EQUAL, engine="sequential", dtype=torch.float32):
    """The states after each round, the first included, and what came of the rounds."""
    federation = noisy_images(sizes)
    network = Network(small_cnn("batch"), dtype=dtype)
    program = ClientProgram(algorithm, network.layout)
    made = ENGINES[engine](network, federation.examples)
    states, outcomes = [begin(network, program, federation, CPU)], []
    try:
        for _ in range(rounds):
            state, outcome = run_round(program, federation, made, states[-1], 5, clock)
            states.append(state)
            outcomes.append(outcome)
    finally:
        made.close()
    return states, outcomes


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
@pytest.mark.parametrize("server", [(), (fedavgm(0.9),)], ids=["fedavg", "fedavgm"])
def test_a_buffer_of_the_cohort_and_equal_speeds_is_fedavg_to_the_last_bit(server, engine):
    """Five of ten clients a round: the same five."""
    expected, plain = play(compose(BASE, *server), 3, engine=engine)
    found, outcomes = play(compose(BASE, fedbuff(5, weigh="examples"), *server), 3, engine=engine)
    assert [one.clients for one in outcomes] == [one.clients for one in plain]
    assert_equal(found=found[-1].params, expected=expected[-1].params)
    assert_equal(found=found[-1].buffers, expected=expected[-1].buffers)
    same, _ = play(compose(BASE, fedbuff(5), *server), 3, engine=engine)
    torch.testing.assert_close(same[-1].params, expected[-1].params)  # of equal sizes


def test_one_client_at_a_time_with_alpha_1_is_training_passed_on():
    one = replace(BASE, select=Uniformly(1))
    expected, _ = play(one, 4)
    found, outcomes = play(compose(one, fedasync(alpha=1.0)), 4)
    assert [one.reports.arrived[0].version for one in outcomes] == [0, 1, 2, 3]
    assert_equal(found=found[-1].params, expected=expected[-1].params)


@dataclass(frozen=True)
class Only(Select):
    client: int

    @property
    def cohort_size(self) -> int:
        return 1

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:
        return torch.tensor([self.client])


WHOLE = replace(BASE, select=Uniformly(4), draw=Epochs(1, 1000), solve=Sgd(0.1))
SIZES = [6, 10, 14, 18, 22, 26, 30, 34, 38, 42]  # so they are of different speed


def trained(state, client):
    """The model that a client makes of a state's, over the whole of its examples."""
    federation = noisy_images(SIZES)
    network = Network(small_cnn("none"), dtype=torch.float64)
    program = ClientProgram(replace(WHOLE, select=Only(client)), network.layout)
    plain = replace(state, server=program.algorithm.advance.init(state.params), in_training={})
    engine = ENGINES["sequential"](network, federation.examples)
    return run_round(program, federation, engine, plain, 0)[0].params


def run_whole(algorithm, rounds, engine="sequential", network=None):
    federation = noisy_images(SIZES)
    network = network or Network(small_cnn("none"), dtype=torch.float64)
    program = ClientProgram(algorithm, network.layout)
    made = ENGINES[engine](network, federation.examples)
    states, outcomes = [begin(network, program, federation, CPU)], []
    for _ in range(rounds):
        state, outcome = run_round(program, federation, made, states[-1], 5)
        states.append(state)
        outcomes.append(outcome)
    return states, outcomes


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_fedasync_mixes_in_each_model_as_it_arrives(engine):
    states, outcomes = run_whole(compose(WHOLE, fedasync(0.6, "polynomial", a=0.5)), 8, engine)
    ages = [number - one.reports.arrived[0].version for number, one in enumerate(outcomes)]
    assert max(ages) > 1
    for number, (age, one) in enumerate(zip(ages, outcomes, strict=True)):
        alpha = 0.6 / math.sqrt(1 + age)
        local, now = trained(states[number - age], one.clients[0]), states[number].params
        expected = {name: (1 - alpha) * w + alpha * local[name] for name, w in now.items()}
        torch.testing.assert_close(states[number + 1].params, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pace", [fedasync(), fedbuff(3)], ids=["fedasync", "fedbuff"])
def test_models_with_linear_layers_move_alike_on_every_engine(pace):
    """Where clients see few examples, `stacked` may not give such layers to each of them."""

    def ends(engine):
        torch.default_generator.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        network = Network(module, dtype=torch.float64)
        return run_whole(compose(WHOLE, pace), 6, engine, network)

    (*_, expected), outcomes = ends("sequential")
    assert max(number - one.reports.arrived[0].version for number, one in enumerate(outcomes)) > 0
    (*_, found), _ = ends("stacked")
    torch.testing.assert_close(found.params, expected.params, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_fedbuff_adds_up_updates_by_their_age(engine):
    states, outcomes = run_whole(compose(WHOLE, fedbuff(3, a=0.5)), 6, engine)
    ages = []
    for number, one in enumerate(outcomes):
        expected = {name: w.clone() for name, w in states[number].params.items()}
        for started in one.reports.arrived:
            ages.append(number - started.version)
            start = states[started.version]
            local = trained(start, started.client)
            for name, w in expected.items():
                w += (local[name] - start.params[name]) / 3 / math.sqrt(1 + ages[-1])
        torch.testing.assert_close(states[number + 1].params, expected, rtol=1e-9, atol=1e-11)
    assert {0, 1} <= set(ages)


def test_as_many_clients_train_at_any_time_and_none_of_them_twice():
    algorithm = compose(replace(BASE, select=Uniformly(6)), fedbuff(2))
    clock = Clock(synthetic(10, KEY, spread=1.0, jitter=0.3), Faults(dropped=0.2))
    states, outcomes = play(algorithm, 8, clock)
    times = [state.time for state in states]
    assert times == sorted(times) and times[-1] > 0
    for state, one in zip(states[1:], outcomes, strict=True):
        training = state.in_training["client"].tolist()
        assert len(one.clients) == 2
        assert len(set(training)) == len(training) <= 6
        assert set(state.versions) == set(state.in_training["version"].tolist())


@pytest.mark.parametrize("remembering", [fedbn(), None], ids=["fedbn", "momentum"])
def test_clients_that_remember_send_one_update_a_round(remembering):
    """A second one would start from what was remembered before the first, and take its place."""
    few = replace(BASE, select=Uniformly(2), reset=remembering is not None)
    _, outcomes = play(compose(few, fedbuff(4), *filter(None, [remembering])), 4, sizes=[12] * 5)
    assert all(len(set(one.clients)) == 4 for one in outcomes)
    _, outcomes = play(compose(replace(few, reset=True), fedbuff(4)), 4, sizes=[12] * 5)
    assert any(len(set(one.clients)) < 4 for one in outcomes)


def test_the_slowest_client_holds_nobody_up():
    """One of four is a hundred times slower, and three rounds that wait for it take as long."""
    speed = torch.tensor([100.0, 100.0, 100.0, 1.0], dtype=torch.float64)
    always = torch.full((4, 1), math.inf, dtype=torch.float64)
    fast = torch.full((4,), 1e12, dtype=torch.float64)
    clock = Clock(Devices(speed, fast, fast, torch.zeros_like(always), always))
    everyone = replace(BASE, select=Uniformly(4), draw=Epochs(1, 32))
    waiting, _ = play(everyone, 3, clock, [12] * 4)
    going_on, _ = play(compose(everyone, fedbuff(3)), 3, clock, [12] * 4)
    assert waiting[-1].time == pytest.approx(36.0, rel=1e-3)
    assert going_on[-1].time == pytest.approx(0.36, rel=1e-3)


def test_a_client_that_takes_too_long_is_given_up():
    clock = Clock(synthetic(10, KEY, spread=1.5), reporting=Reporting(deadline=0.25))
    _, outcomes = play(compose(BASE, fedbuff(2)), 6, clock)
    assert any("late" in one.reports.failed for one in outcomes)


def cohort(ages: list[int], sizes: list[int]) -> Cohort:
    held = torch.tensor(sizes)
    return Cohort(
        torch.arange(len(ages)),
        held,
        held,
        held.double() / held.sum(),
        None,
        10,
        int(held.sum()),
        torch.tensor(ages),
    )


def test_updates_count_less_the_older_they_are():
    some = cohort([0, 3, 8], [1, 1, 2])
    assert Fading(Equally(), 0.5)(some).tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 9])
    assert Fading(ByExamples(), 1.0)(some).tolist() == pytest.approx([1 / 4, 1 / 16, 1 / 18])
    assert Mixed(0.6, "constant", 1.0, 0.0)(some).tolist() == pytest.approx([0.6] * 3)
    assert Mixed(0.6, "polynomial", 1.0, 0.0)(some).tolist() == pytest.approx([0.6, 0.15, 0.6 / 9])
    assert Mixed(0.6, "hinge", 10.0, 3.0)(some).tolist() == pytest.approx([0.6, 0.6, 0.6 / 51])


@pytest.mark.parametrize("other", [median(), scaffold(), fedvc(size=16)])
def test_what_would_not_count_ages_is_refused(other):
    with pytest.raises(ValueError, match="leave one out"):
        compose(replace(BASE, solve=Sgd(0.1)), fedbuff(), other)


def test_no_clock_is_one_of_devices_that_are_alike():
    found, _ = play(compose(BASE, fedbuff(3)), 3)
    expected, _ = play(compose(BASE, fedbuff(3)), 3, Clock(alike(10, KEY)))
    assert_equal(found=found[-1].params, expected=expected[-1].params)
