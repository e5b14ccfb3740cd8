"""Clients that fail: shares are those of the clients that reported, on every engine."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedlens.algorithm import compose
from fedlens.algorithm.pieces import Uniformly
from fedlens.algorithm.slots import Select
from fedlens.algorithms import fedvc, krum
from fedlens.core import keys
from fedlens.core.federation import Federation
from fedlens.network.network import Network
from fedlens.rounds import State, begin, cohorts, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.cohorts import BelowQuorum
from fedlens.rounds.devices import alike, synthetic
from fedlens.rounds.reports import Clock, Faults, Reporting
from fedlens.rounds.traffic import traffic
from tests.federations import CPU, ENGINES, FEW, noisy_images, small_cnn
from tests.papers_under_test import ALGORITHMS, BASE

KEY = keys.root(0)
OFTEN = Faults(absent=0.1, dropped=0.1, nan=0.05, infinite=0.05, huge=0.05, malformed=0.05)
HARD = Clock(
    synthetic(10, KEY, spread=1.0), OFTEN, Reporting(over_select=1.6, deadline=0.8, quorum=0.4)
)
WAITING = [name for name, one in ALGORITHMS.items() if one.pace is None and not one.covered]


@dataclass(frozen=True)
class Chosen(Select):
    """The clients that are named, round by round."""

    by_round: tuple[tuple[int, ...], ...]

    @property
    def cohort_size(self) -> int:
        return 5

    def __call__(self, federation: Federation, round: int, key: Tensor) -> Tensor:
        return torch.tensor(self.by_round[round])


def play(algorithm, rounds=2, clock=None, engine="sequential", federation=None, norm="batch"):
    """The last state, and what came of each round."""
    federation = federation or noisy_images(FEW)
    network = Network(small_cnn(norm), dtype=torch.float64)
    program = ClientProgram(algorithm, network.layout, measures_norm=clock is not None)
    made = ENGINES[engine](network, federation.examples)
    state, outcomes = begin(network, program, federation, CPU), []
    try:
        for _ in range(rounds):
            state, outcome = run_round(program, federation, made, state, 3, clock)
            outcomes.append(outcome)
    finally:
        made.close()
    return state, outcomes


def same(found: State, expected: State) -> None:
    for part in ("params", "buffers", "server", "told"):
        torch.testing.assert_close(
            getattr(found, part), getattr(expected, part), atol=1e-12, rtol=0
        )
    assert found.clients.rows.keys() == expected.clients.rows.keys()
    assert found.clients.num_examples == expected.clients.num_examples
    for client, row in expected.clients.rows.items():
        torch.testing.assert_close(dict(found.clients.rows[client]), dict(row), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", WAITING)
def test_a_round_is_that_of_those_who_reported_and_nobody_else(name):
    """Shares, what the server remembers and tells, and what clients remember."""
    algorithm = ALGORITHMS[name]
    if name.startswith("fedvc"):
        algorithm = compose(BASE, fedvc(size=16, replacement=False))
    elif algorithm.select.replacement:
        algorithm = replace(algorithm, select=Uniformly(5))
    found, outcomes = play(algorithm, clock=HARD)
    reported = tuple(tuple(outcome.clients) for outcome in outcomes)
    assert any(len(outcome.reports.failed) for outcome in outcomes)
    expected, _ = play(replace(algorithm, select=Chosen(reported)))
    same(found, expected)


@pytest.mark.parametrize("engine", ["stacked", "stacked, recorded", "processes"])
def test_the_same_clients_fail_on_every_engine(engine):
    algorithm = ALGORITHMS["scaffold"]
    expected, first = play(algorithm, 3, HARD)
    found, other = play(algorithm, 3, HARD, engine)
    torch.testing.assert_close(found.params, expected.params, rtol=1e-9, atol=1e-11)
    assert found.time == expected.time
    for one, two in zip(first, other, strict=True):
        assert (one.clients, one.reports.failed) == (two.clients, two.reports.failed)


def test_a_client_drawn_twice_may_fail_once():
    algorithm = compose(replace(BASE, select=Uniformly(8)), fedvc(size=16))
    _, outcomes = play(algorithm, 6, Clock(alike(10, KEY), Faults(dropped=0.4)))
    twice = [
        client
        for one in outcomes
        for client in one.clients
        if client in one.reports.failed.get("dropped", ())
    ]
    assert twice
    for one in outcomes:
        assert len(one.clients) + len(one.reports.failed.get("dropped", ())) == 8


def test_below_quorum_others_are_asked_and_time_goes_on():
    clock = Clock(alike(10, KEY), Faults(absent=0.6), Reporting(deadline=30.0, quorum=0.6))
    state, outcomes = play(BASE, 4, clock)
    assert max(one.reports.attempts for one in outcomes) > 1
    for one in outcomes:
        assert len(one.clients) >= 3
        asked = len(one.clients) + sum(map(len, one.reports.failed.values()))
        assert asked == 5 * one.reports.attempts
    again = sum(one.reports.attempts - 1 for one in outcomes)
    assert state.time >= 90.0 * again


def test_a_round_may_stop_below_quorum(monkeypatch):
    monkeypatch.setattr(cohorts, "MOST_ATTEMPTS", 20)
    clock = Clock(alike(10, KEY), Faults(absent=1.0), Reporting(below_quorum="stop"))
    with pytest.raises(BelowQuorum, match="0 of 5"):
        play(BASE, clock=clock)
    with pytest.raises(BelowQuorum, match="attempt 20"):
        play(BASE, clock=replace(clock, reporting=Reporting()))


def test_a_combination_that_needs_more_uploads_is_a_quorum_of_its_own():
    algorithm = compose(replace(BASE, select=Uniformly(7)), krum(byzantine=1))
    assert algorithm.combine.fewest == 5
    _, outcomes = play(algorithm, 4, Clock(alike(10, KEY), Faults(dropped=0.3)))
    assert min(len(one.clients) for one in outcomes) >= 5


SPOILT = {"nan": math.nan, "infinite": math.inf}


def spoilt(client: int, value: float) -> Federation:
    """A federation of which one client's images are spoilt."""
    federation = noisy_images([12] * 10)
    images = federation.examples.images.clone()
    images[federation.everyone(0).members(client)] = value
    return replace(federation, examples=replace(federation.examples, images=images))


@pytest.mark.parametrize("engine", ["sequential", "stacked", "stacked, recorded", "processes"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedadmm", "median", "clip"])
def test_what_is_not_finite_never_reaches_the_model(name, engine):
    """Found where it is made, in sums of several clients, too; whoever sent it keeps nothing."""
    algorithm = replace(ALGORITHMS[name], select=Uniformly(10))
    everyone = Reporting()
    found, outcomes = play(
        algorithm, 2, Clock(alike(10, KEY), reporting=everyone), engine, spoilt(4, math.nan)
    )
    assert [one.reports.failed for one in outcomes] == [{"nan": [4]}] * 2
    reported = tuple(tuple(one.clients) for one in outcomes)
    assert 4 not in reported[0] and len(reported[0]) == 9
    expected, _ = play(replace(algorithm, select=Chosen(reported)), 2, federation=spoilt(4, 0.0))
    torch.testing.assert_close(found.params, expected.params, rtol=1e-9, atol=1e-11)
    assert found.clients.rows.keys() == expected.clients.rows.keys()


def test_an_absurdly_long_update_is_not_taken():
    clock = Clock(alike(10, KEY), reporting=Reporting(largest=1e4))
    _, (outcome,) = play(BASE, 1, clock, federation=spoilt(2, 1e6), norm="none")
    taken = {*outcome.clients, *outcome.reports.failed.get("huge", ())}
    assert outcome.reports.failed == ({"huge": [2]} if 2 in taken else {})
    assert Reporting(largest=2.0).rejects(2.5) == "huge"
    assert Reporting(largest=2.0).rejects(2.0) is None
    assert Reporting().rejects(math.inf) == "infinite"


def test_where_nothing_sound_is_sent_the_round_gives_up():
    federation = noisy_images([12] * 10)
    broken = replace(federation.examples, images=federation.examples.images * math.nan)
    with pytest.raises(BelowQuorum, match="0 of 5"):
        play(BASE, 1, Clock(alike(10, KEY)), federation=replace(federation, examples=broken))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedadmm", "qfedavg", "quantize"])
def test_the_clock_counts_the_bytes_that_the_record_counts(name):
    algorithm = ALGORITHMS[name]
    network, federation = Network(small_cnn(), dtype=torch.float64), noisy_images(FEW)
    program = ClientProgram(algorithm, network.layout)
    state = begin(network, program, federation, CPU)
    up, down = traffic(program, state.params, state.buffers, state.told)
    _, (outcome,) = play(algorithm, 1, norm="group")
    assert (outcome.bytes_up, outcome.bytes_down) == (5 * up, 5 * down)
