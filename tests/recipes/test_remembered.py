"""What rounds cost is remembered: a second estimate trains nothing."""

import os
from dataclasses import replace

import pytest

from fedlens.config.experiment import Clients, Experiment, LocalTraining, Named
from fedlens.recipes import estimate
from fedlens.recipes.estimate import (
    REMEMBERED_SECONDS,
    Cost,
    Remembered,
    Speed,
    Timing,
    Work,
)

PLAIN = Experiment(
    dataset=Named("fashion-mnist-mini"),
    model=Named("linear"),
    rounds=20,
    engine="sequential",
    clients=Clients(count=20, per_round=4),
    local=LocalTraining(lr=0.05),
)
COST = Cost(1.5, Speed(Work(3.0, 40.0), 0.25, 0.125, 0.0625), 0.5)


@pytest.fixture
def timed(monkeypatch):
    """The works whose cost was asked for."""
    asked = []

    def cost(setups, work, seconds, tell):
        asked.append(work)
        return COST

    monkeypatch.setattr(estimate, "cost", cost)
    return asked


def seconds(folder, experiment):
    (found,) = Timing([experiment], remembered=Remembered(folder)).sweeps([{"one": experiment}])
    return found.seconds


def test_a_second_estimate_is_the_first_and_times_nothing(tmp_path, timed):
    first = seconds(tmp_path / "new", PLAIN)
    assert seconds(tmp_path / "new", PLAIN) == first > 0
    assert len(timed) == 1


def test_another_kind_of_run_is_timed_by_itself(tmp_path, timed):
    seconds(tmp_path, PLAIN)
    seconds(tmp_path, replace(PLAIN, rounds=40))  # of the same kind
    assert len(timed) == 1
    seconds(tmp_path, replace(PLAIN, model=Named("lenet5")))
    assert len(timed) == 2


def test_after_a_day_it_is_timed_anew(tmp_path, timed):
    seconds(tmp_path, PLAIN)
    (file,) = tmp_path.iterdir()
    changed = file.stat().st_mtime - REMEMBERED_SECONDS
    os.utime(file, (changed, changed))
    seconds(tmp_path, PLAIN)
    assert len(timed) == 2


@pytest.mark.parametrize(
    "content", ["", "[1, 2]", '{"a": 1}', "null", '[1, [[["a"], 1], 1, 1], 1]']
)
def test_a_damaged_file_is_timed_anew_and_replaced(tmp_path, timed, content):
    seconds(tmp_path, PLAIN)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(content)
    seconds(tmp_path, PLAIN)
    assert len(timed) == 2
    assert file.read_text() == whole


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, timed):
    (tmp_path / "file").write_text("")
    first = seconds(tmp_path / "file", PLAIN)
    assert seconds(tmp_path / "file", PLAIN) == first
    assert len(timed) == 2
