"""How runs end that do not simply finish."""

import itertools
import json
import math

import pytest

import fedlens as fl
from fedlens.rounds import State
from fedlens.runs.folder import Mark, RunFolder
from fedlens.runs.records import Record
from tests.runs.small_runs import OF_TRAINING, described, lines


def test_a_run_that_diverges_stops_and_says_so(tmp_path):
    local = fl.LocalTraining(lr=1e30)
    experiment = described(local=local, rounds=9, evaluate=fl.Evaluate(every=3))
    result = fl.run(experiment, tmp_path / "run")
    assert result.status == result.summary["status"] == "diverged"
    assert len(result.records) < 9
    written = lines(tmp_path / "run")
    assert len(written) == len(result.records)
    assert all(record.keys() == OF_TRAINING for record in written)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert "NaN" not in (tmp_path / "run" / "rounds.jsonl").read_text()


def test_the_best_of_a_measure_is_never_one_that_is_no_number(tmp_path):
    # The model is finite after round 1, but so large that its loss is not.
    result = fl.run(described(local=fl.LocalTraining(lr=1e30), rounds=9), tmp_path / "run")
    assert math.isnan(result.records[0]["test_loss"])
    assert "test_loss" not in result.summary["best"]
    assert result.summary["best"]["test_accuracy"]["round"] == 1


def test_a_failure_in_the_middle_leaves_whole_rounds_and_says_failed(tmp_path):
    def fail(record: Record) -> None:
        if record["round"] == 2:
            raise RuntimeError("the watch broke")

    with pytest.raises(RuntimeError, match="the watch broke"):
        fl.run(described(), tmp_path / "run", watch=fail)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert fl.resume(tmp_path / "run", experiment=described()).status == "finished"
    assert [record["round"] for record in lines(tmp_path / "run")] == [1, 2, 3]


def test_saving_takes_a_tenth_of_the_time_at_the_most(tmp_path, monkeypatch):
    clock = [0.0]
    saved: list[tuple[float, int]] = []

    def save(self: RunFolder, state: State, records: Mark, best: None) -> None:
        saved.append((clock[0], state.round))
        clock[0] += 30.0  # what clients remember is large

    monkeypatch.setattr("fedlens.runs.loop.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(RunFolder, "save_state", save)

    def tick(record: Record) -> None:
        clock[0] += 4.0

    fl.run(described(rounds=100), tmp_path / "run", watch=tick)
    *times, last = [moment for moment, _ in saved]
    assert 8 <= times[0] <= 20, "the first after ten seconds or so"
    assert all(b - a >= 300 for a, b in itertools.pairwise(times))
    assert saved[-1][1] == 100 and last >= 400, "and always the last round"
