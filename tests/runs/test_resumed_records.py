"""What algorithms measure of themselves, in runs that were stopped and resumed."""

import json

import pytest

import fedlens as fl
from fedlens.runs.records import Record, read
from tests.runs.resumable import Stop, forgetful


def test_what_an_algorithm_records_is_the_same_after_a_resume_too(tmp_path):
    experiment = forgetful(algorithm="fedadmm")

    def stop(record: Record) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    fl.run(experiment, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, tmp_path / "stopped", watch=stop)
    fl.resume(tmp_path / "stopped", experiment=experiment)
    whole, stopped = (
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("whole", "stopped")
    )
    residuals = [[record["primal_residual"] for record in run] for run in (whole, stopped)]
    assert residuals[0] == residuals[1]


def test_details_of_a_model_are_not_shown_as_those_of_one_that_came_later(tmp_path):
    experiment, run = forgetful(rounds=2), tmp_path / "run"
    fl.run(experiment, run)
    assert "confusion" in read(run).evaluation
    with pytest.raises(KeyboardInterrupt):
        fl.resume(run, rounds=4, experiment=experiment, watch=Stop(3))
    assert read(run).num_rounds == 3 and not read(run).evaluation
    fl.resume(run, rounds=4, experiment=experiment)
    assert "confusion" in read(run).evaluation
