"""Runs that are stopped and resumed equal those that were not."""

import json
import multiprocessing
import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.runs.records import Record
from tests.runs.resumable import Stop, assert_same_run, contents, forgetful, mindful, records
from tests.toys import toy

pytestmark = pytest.mark.usefixtures("one_thread", "quick_pages")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_no_worker_outlives_a_run_however_it_ends(tmp_path, error):
    experiment = forgetful(engine="processes")
    seen = []

    def look(record: Record) -> None:
        seen.append(len(multiprocessing.active_children()))
        if error and record["round"] == 2:
            raise error

    with pytest.raises(error) if error else nullcontext():
        fl.run(experiment, tmp_path / "run", watch=look)
    assert min(seen) > 0
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("describe", [forgetful, mindful])
@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
def test_a_run_stopped_twice_and_resumed_equals_one_that_was_not(tmp_path, describe, engine):
    experiment = describe(engine=engine)
    fl.run(experiment, tmp_path / "whole")
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, run, watch=Stop(1))
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert len(records(run)) == 1
    with pytest.raises(KeyboardInterrupt):
        fl.resume(run, experiment=experiment, watch=Stop(3))
    result = fl.resume(run, experiment=experiment)
    assert [record["round"] for record in result.records] == [1, 2, 3, 4]
    assert_same_run(run, tmp_path / "whole")


def test_a_run_killed_before_its_first_checkpoint_starts_again_and_says_so(tmp_path, caplog):
    experiment = mindful()
    fl.run(experiment, tmp_path / "whole")
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "whole", run)
    for name in ("checkpoint", "model.safetensors", "summary.json"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    fl.resume(run, experiment=experiment)
    assert_same_run(run, tmp_path / "whole")
    assert caplog.messages == [f"{run} has no checkpoint: its rounds are run from the first one on"]


@pytest.mark.parametrize("torn", ['{"round": 3, "train_l', "{", '{"round": 3}\n{"rou', "\n"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    experiment = forgetful()
    fl.run(experiment, tmp_path / "whole")
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, run, watch=Stop(2))
    with (run / "rounds.jsonl").open("a") as file:
        file.write(torn)
    fl.resume(run, experiment=experiment)
    assert_same_run(run, tmp_path / "whole")


@pytest.mark.parametrize("local", [fl.LocalTraining(), fl.LocalTraining(lr=1e30)])
def test_resuming_a_run_that_ended_changes_nothing(tmp_path, local):
    experiment = forgetful(local=local, evaluate=fl.Evaluate(every=3))
    first = fl.run(experiment, tmp_path / "run")
    before = contents(tmp_path / "run")
    again = fl.resume(tmp_path / "run", experiment=experiment)
    assert again.status == first.status
    assert len(again.records) == len(first.records)
    assert contents(tmp_path / "run") == before


def test_more_rounds_may_be_asked_of_a_run_that_ended(tmp_path):
    fl.run(mindful(rounds=4), tmp_path / "whole")
    fl.run(mindful(rounds=2), tmp_path / "run")
    fl.resume(tmp_path / "run", experiment=mindful(rounds=4))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_other_data_or_another_model_are_refused(tmp_path):
    run = tmp_path / "run"
    fl.run(forgetful(), run)
    before = contents(run)
    fewer = fl.Dataset("toy", toy().train.take(torch.arange(40)), toy().test, ("a", "b", "c"))
    with pytest.raises(ValueError, match="the data are not those it started with"):
        fl.resume(run, experiment=forgetful(dataset=fewer))
    with pytest.raises(ValueError, match="linear"):
        fl.resume(run, experiment=forgetful(model="linear"))
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(ValueError, match="was run with another model: put the old one back"):
        fl.resume(run, experiment=forgetful(model=other))
    with pytest.raises(ValueError, match="was given from Python"):
        fl.resume(run)
    assert contents(run) == before
