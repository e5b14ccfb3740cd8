"""Devices, their traces and their clock: who reports, who is late, and when a round closes."""

import math
from collections import Counter
from dataclasses import fields

import pytest
import torch

from fedlens.config.names import OUTCOMES
from fedlens.core import keys
from fedlens.rounds.devices import DAY, HOUR, Devices, synthetic, trace
from fedlens.rounds.reports import Clock, Faults, Reporting, drawn

KEY = keys.root(0)


def test_faults_come_as_often_as_they_should():
    chances = Faults(0.1, 0.2, 0.05, 0.02, 0.03, 0.1)
    found = Counter(drawn(chances, keys.fold(KEY, torch.arange(20_000))))
    assert OUTCOMES[4:10] == tuple(f.name for f in fields(Faults))
    for name in OUTCOMES[4:10]:
        assert found[name] / 20_000 == pytest.approx(getattr(chances, name), abs=0.01)
    assert found["reported"] / 20_000 == pytest.approx(0.5, abs=0.015)


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
    with pytest.raises(ValueError, match=r"nowhere\.csv"):
        trace(2, KEY, path="nowhere.csv")
