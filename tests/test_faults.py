"""Clients that fail: shares are those of the clients that reported, on every engine."""

import json
import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlens as fl
from fedlens import keys
from fedlens.algorithm import compose
from fedlens.algorithms import fedvc, krum
from fedlens.client import ClientProgram
from fedlens.federation import Federation
from fedlens.names import OUTCOMES
from fedlens.network.network import Network
from fedlens.pieces import Uniformly
from fedlens.reporting import gathering
from fedlens.reporting.cohorts import BelowQuorum
from fedlens.reporting.devices import DAY, HOUR, Devices, alike, synthetic, trace
from fedlens.reporting.reports import Clock, Faults, Reporting
from fedlens.rounds import State, begin, run_round
from fedlens.slots import Select
from fedlens.traffic import traffic
from tests.federations import CPU, ENGINES, RAGGED, noisy_images, small_cnn
from tests.papers_under_test import ALGORITHMS, BASE
from tests.toys import toy

KEY = keys.root(0)
OFTEN = Faults(absent=0.1, dropped=0.1, nan=0.05, infinite=0.05, huge=0.05, malformed=0.05)
HARD = Clock(
    synthetic(10, KEY, spread=1.0), OFTEN, Reporting(over_select=1.6, deadline=2.0, quorum=0.4)
)
WAITING = [name for name, one in ALGORITHMS.items() if one.pace is None]


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
    federation = federation or noisy_images(RAGGED)
    network = Network(small_cnn(norm), dtype=torch.float64)
    program = ClientProgram(algorithm, network.layout, guarded=clock is not None)
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


def test_faults_come_as_often_as_they_should():
    chances = Faults(0.1, 0.2, 0.05, 0.02, 0.03, 0.1)
    drawn = Counter(chances.drawn(keys.fold(KEY, torch.arange(20_000))))
    assert OUTCOMES[4:10] == tuple(f.name for f in fields(Faults))
    for name in OUTCOMES[4:10]:
        assert drawn[name] / 20_000 == pytest.approx(getattr(chances, name), abs=0.01)
    assert drawn["reported"] / 20_000 == pytest.approx(0.5, abs=0.015)


def device(speeds, opens=0.0, closes=math.inf):
    speed = torch.tensor(speeds, dtype=torch.float64)
    ones = torch.ones_like(speed)
    return Devices(speed, ones * 1e12, ones * 1e12, ones[:, None] * opens, ones[:, None] * closes)


def outcomes_of(clock, goal, examples, time=0.0):
    clients = torch.arange(len(examples))
    ends = clock.ends(clients, keys.fold(KEY, clients), torch.tensor(examples), time)
    return clock.first(ends, goal, time)


def test_the_first_reports_are_taken_and_the_slowest_cut_off():
    """100 examples at 10, 20, 50, 100 a second take 10, 5, 2 and 1 seconds."""
    devices, examples = device([10, 20, 50, 100]), [100] * 4
    within = Clock(devices, reporting=Reporting(deadline=6.0))
    assert outcomes_of(within, 2, examples) == (["surplus", "surplus", "reported", "reported"], 2.0)
    assert outcomes_of(within, 4, examples) == (["late", "reported", "reported", "reported"], 6.0)
    assert outcomes_of(Clock(devices), 4, examples, time=7.0)[1] == 17.0


def test_one_that_leaves_while_it_trains_is_lost_and_one_that_is_away_is_not_asked():
    devices = device([10, 100], opens=8 * HOUR, closes=9 * HOUR)
    examples, clock = [100, 100], Clock(devices)
    assert outcomes_of(clock, 2, examples, 7 * HOUR)[0] == ["unavailable", "unavailable"]
    assert outcomes_of(clock, 2, examples, DAY + 8 * HOUR)[0] == ["reported", "reported"]
    outcomes, closed = outcomes_of(clock, 2, examples, 9 * HOUR - 5)
    assert outcomes == ["dropped", "reported"] and closed == 9 * HOUR


def test_bytes_take_their_time():
    one = torch.ones(1, dtype=torch.float64)
    devices = Devices(one * 50, one * 10, one * 40, one[:, None] * 0, one[:, None] * math.inf)
    found = devices.seconds(torch.tensor([3]), KEY[None], torch.tensor([100]), up=30, down=200)
    assert found.tolist() == [200 / 40 + 100 / 50 + 30 / 10]


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
    monkeypatch.setattr(gathering, "MOST_ATTEMPTS", 20)
    clock = Clock(alike(10, KEY), Faults(absent=1.0), Reporting(below_quorum="stop"))
    with pytest.raises(BelowQuorum, match="round 1 0 of 5 clients reported"):
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
    network, federation = Network(small_cnn(), dtype=torch.float64), noisy_images(RAGGED)
    program = ClientProgram(algorithm, network.layout)
    state = begin(network, program, federation, CPU)
    up, down = traffic(program, state.params, state.buffers, state.told)
    _, (outcome,) = play(algorithm, 1, norm="group")
    assert (outcome.bytes_up, outcome.bytes_down) == (5 * up, 5 * down)


def test_synthetic_devices_are_there_for_their_hours():
    devices = synthetic(4000, KEY, hours=6)
    every = torch.arange(4000)
    shares = [
        float((devices.there_until(every, day * DAY + hour * HOUR) > day * DAY + hour * HOUR)
              .double().mean())
        for day in (0, 3) for hour in (0, 5, 13, 23.5)
    ]  # fmt: skip
    assert shares == [pytest.approx(0.25, abs=0.03)] * 8
    assert float(devices.examples_per_second.median()) == pytest.approx(100, rel=0.05)


def test_devices_are_read_from_a_trace(tmp_path):
    file = tmp_path / "devices.csv"
    file.write_text(
        "device,examples_per_second,up_mbit,down_mbit,from_hour,to_hour\n"
        "a,10,8,16,22,6\nb,20,8,16,8,12\nb,20,8,16,13,17\nc,40,8,16,,\n"
    )
    devices = trace(7, KEY, path=str(file))
    assert devices.examples_per_second.tolist() == [10, 20, 40]
    assert devices.up.tolist() == [1e6] * 3 and devices.down.tolist() == [2e6] * 3
    four = torch.arange(4)  # the fourth has the first one's device
    there = {hour: (devices.there_until(four, hour * HOUR) > hour * HOUR).tolist()
             for hour in (3, 7, 9, 12.5, 14, 23)}  # fmt: skip
    assert there == {
        3: [True, False, True, True],
        7: [False, False, True, False],
        9: [False, True, True, False],
        12.5: [False, False, True, False],
        14: [False, True, True, False],
        23: [True, False, True, True],
    }
    assert devices.there_until(four, 23 * HOUR)[0] == DAY + 6 * HOUR


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("device,up_mbit\na,3\n", "no column examples_per_second"),
        ("device,examples_per_second,up_mbit,down_mbit\n", "lists no device"),
        ("device,examples_per_second,up_mbit,down_mbit\na,0,1,1\n", "line 2: examples_per_second"),
        ("device,examples_per_second,up_mbit,down_mbit,from_hour,to_hour\na,1,1,1,5,x\n",
         "line 2: from_hour is '5'"),
    ],
)  # fmt: skip
def test_a_trace_that_makes_no_sense_is_refused(tmp_path, content, message):
    file = tmp_path / "devices.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        trace(2, KEY, path=str(file))


def test_a_missing_trace_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.csv cannot be read"):
        trace(2, KEY, path="nowhere.csv")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"faults": {"nan": 1.5}}, "faults.nan is 1.5: choose a chance"),
        ({"faults": {"nan": 0.7, "huge": 0.6}}, "faults have chances of 1.3 together"),
        ({"faults": {"late": 0.1}}, "unknown key 'faults.late'"),
        ({"reporting": {"over_select": 0.5}}, "reporting.over_select is 0.5: choose 1 or more"),
        ({"reporting": {"quorum": 2.0}}, "reporting.quorum is 2.0"),
        ({"reporting": {"deadline": 0.0}}, "reporting.deadline is 0.0"),
        ({"reporting": {"below_quorum": "wait"}}, "reporting.below_quorum is 'wait'"),
        ({"clients": {"devices": "fast"}}, "unknown devices 'fast'"),
        ({"clients": {"devices": {"name": "synthetic", "hour": 3}}}, "did you mean 'hours'"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tables, message):
    with pytest.raises(ValueError, match=message):
        fl.Experiment.of({"dataset": "fashion-mnist-mini", "model": "linear", "rounds": 1} | tables)


def experiment(**more):
    return fl.Experiment(
        dataset=toy(),
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)),
        rounds=6,
        engine="sequential",
        clients=fl.Clients(
            count=12, per_round=4, devices={"name": "synthetic", "spread": 1.0, "jitter": 0.2}
        ),
        local=fl.LocalTraining(batch_size=2),
        **more,
    )


FAILING = {
    "faults": {"dropped": 0.15, "nan": 0.1},
    "reporting": {"over_select": 1.5, "deadline": 2.0, "quorum": 0.5},
}
KINDS: dict[str, dict[str, Any]] = {
    "those who reported": FAILING,
    "with memory": FAILING | {"algorithm": "scaffold"},
    "fedbuff": {"faults": {"dropped": 0.15}, "algorithm": {"name": "fedbuff", "buffer": 3}},
    "fedasync": {"faults": {"dropped": 0.4}, "algorithm": "fedasync"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_meets_the_same_faults(kind, tmp_path):
    whole = experiment(**KINDS[kind])
    expected = fl.run(whole, tmp_path / "whole")
    fl.run(replace(whole, rounds=3), tmp_path / "part")
    found = fl.resume(tmp_path / "part", experiment=whole)
    for name, value in expected.model.items():
        assert torch.equal(found.model[name], value), name

    def records(folder):
        lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
        return [{k: v for k, v in one.items() if not k.endswith("seconds")} for one in lines]

    assert records(tmp_path / "part") == records(tmp_path / "whole")
    for name in ("clock", "outcomes", "clock_to"):
        assert found.summary[name] == expected.summary[name]
    assert sum(expected.summary["outcomes"].values()) > expected.summary["outcomes"]["reported"]
    assert list(expected.summary["outcomes"]) == [
        name for name in OUTCOMES if name in expected.summary["outcomes"]
    ]


def test_a_run_that_stops_below_quorum_says_so_and_keeps_what_it_has(tmp_path):
    result = fl.run(
        experiment(faults={"dropped": 0.5}, reporting={"quorum": 0.75, "below_quorum": "stop"}),
        tmp_path / "run",
    )
    assert result.status == "stopped" and len(result.records) < 6
    assert "the quorum is 3" in result.summary["reason"]
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_asynchronous_rounds_have_no_quorum():
    with pytest.raises(ValueError, match="wait for no quorum"):
        fl.run(experiment(algorithm="fedbuff", reporting={"quorum": 0.5}))


def test_points_of_a_sweep_fail_each_by_itself():
    points = {
        str(seed): replace(
            experiment(
                faults={"dropped": 0.35},
                reporting={"quorum": 0.5, "below_quorum": "stop"},
                seed=seed,
            ),
            engine="stacked",
        )
        for seed in range(4)
    }
    together = fl.sweep(points)
    assert {one.status for one in together.values()} == {"finished", "stopped"}
    for name, one in points.items():
        alone = fl.run(one)
        assert (alone.status, len(alone.records)) == (
            together[name].status,
            len(together[name].records),
        )
        assert [r["failed"] for r in alone.records] == [r["failed"] for r in together[name].records]
