"""A run that is over before its last round, and the best of its models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedlens as fl
from fedlens.runs.loop import Stopping
from fedlens.storage.run_files import read_status
from tests.federations import assert_equal
from tests.runs.resumable import assert_same_run
from tests.toys import toy


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(96), "model": "linear", "rounds": 12}
    plain |= {"engine": "sequential", "clients": {"count": 4, "per_round": 2}}
    plain |= {"local": {"lr": 0.02, "batch_size": 4}}
    plain |= {"evaluate": {"on": ["test", "validation"], "validation": 0.25}}
    return fl.Experiment(**plain | changes)


def whole() -> fl.Result:
    return fl.run(described())


def test_a_run_stops_when_it_is_good_enough(tmp_path):
    curve = [record["validation_accuracy"] for record in whole().records]
    target = sorted(set(curve))[1]
    expected = next(n for n, accuracy in enumerate(curve, 1) if accuracy >= target)
    result = fl.run(described(stop={"accuracy": target}), tmp_path / "run")
    assert result.status == "finished" and len(result.records) == expected < 12
    reason = f"stop.accuracy: the validation accuracy is {curve[expected - 1]:.4g}"
    assert result.summary["reason"] == reason
    detail = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert detail["part"] == "test", "the last model is looked at, though it was not the last round"


@pytest.mark.parametrize(
    ("stop", "spent"),
    [({"batches": 30}, "batches_total"), ({"bytes": 3_000}, "bytes"), ({"seconds": 1e-9}, None)],
)
def test_a_run_stops_when_its_budget_is_spent(stop, spent):
    evaluate = {"on": ["test", "validation"], "validation": 0.25, "every": 12}
    records = whole().records
    total, expected = 0, 1
    for record in records if spent else []:
        total += record["bytes_up"] + record["bytes_down"]
        amount = total if spent == "bytes" else record["batches_total"]
        expected = record["round"]
        if amount >= next(iter(stop.values())):
            break
    result = fl.run(described(stop=stop, evaluate=evaluate))
    assert len(result.records) == expected < 12
    assert "test_accuracy" in result.records[-1], "the last model is evaluated"
    assert result.summary["reason"].startswith(f"stop.{next(iter(stop))}: ")


def accuracies(values: list[float], **stop: Any) -> tuple[int, str, list[int]]:
    """When a run with these validation accuracies stops, why, and which were the best in turn."""
    stopping, best = Stopping(described(stop=stop)), []
    for round, value in enumerate(values, 1):
        record = {"round": round, "validation_accuracy": value, "test_accuracy": 1 - value}
        record |= {"bytes_up": 1, "bytes_down": 1, "batches_total": round}
        stopping.spend(record, 0.0)
        if stopping.judge(record):
            best.append(round)
        if stopping.reason:
            return round, stopping.reason, best
    return 0, "", best


def test_patience_counts_evaluations_since_the_best_on_validation():
    round, reason, best = accuracies([0.2, 0.5, 0.5, 0.4, 0.6, 0.6, 0.6, 0.3], patience=3)
    assert (round, best) == (8, [1, 2, 5]), "as good as the best is no better"
    assert reason == (
        "stop.patience: the validation accuracy was best in round 5, 3 evaluations ago"
    )
    assert accuracies([0.2, 0.3, 0.4, 0.5], patience=1)[0] == 0
    assert accuracies([0.5, float("nan")], patience=1)[0] == 2


def test_of_models_that_are_as_accurate_a_lower_loss_is_better():
    stopping, best = Stopping(described(stop={"patience": 2})), []
    seen = [(0.9, 0.5), (0.9, 0.3), (0.8, 0.1), (0.9, 0.2), (0.9, 0.2), (0.9, float("nan"))]
    for round, (accuracy, loss) in enumerate(seen, 1):
        assert not stopping.reason
        if stopping.judge(
            {"round": round, "validation_accuracy": accuracy, "validation_loss": loss}
        ):
            best.append(round)
    assert best == [1, 2, 4]
    assert "best in round 4, 2 evaluations ago" in stopping.reason


def test_a_short_time_is_told_with_its_decimals():
    record = {"bytes_up": 1, "bytes_down": 1, "batches_total": 1}
    for seconds, words in ((0.25, "0.25 of 0.1"), (7_200.4, "7,200 of 0.1")):
        stopping = Stopping(described(stop={"seconds": 0.1}))
        stopping.spend(record, seconds)
        assert stopping.reason == f"stop.seconds: {words} seconds are spent"


class Killed(Exception):
    pass


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
def test_a_run_that_was_killed_stops_where_it_would_have_and_has_the_same_best(engine, tmp_path):
    evaluate = {"on": ["test", "validation"], "validation": 0.25, "best": True}
    experiment = described(engine=engine, stop={"patience": 2}, evaluate=evaluate)
    full = fl.run(experiment, tmp_path / "whole")
    assert 3 < len(full.records) < 12

    def kill(record: dict[str, Any]) -> None:
        if record["round"] == len(full.records) - 1:
            raise Killed

    with pytest.raises(Killed):
        fl.run(experiment, tmp_path / "cut", watch=kill)
    resumed = fl.resume(tmp_path / "cut", experiment=experiment)
    assert resumed.summary["reason"] == full.summary["reason"]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    files = [(tmp_path / name / "best.safetensors").read_bytes() for name in ("cut", "whole")]
    assert files[0] == files[1]
    again = fl.resume(tmp_path / "cut", experiment=experiment, rounds=20)
    assert len(again.records) == len(full.records), "what has stopped does not go on"
    assert again.summary["reason"] == full.summary["reason"]


def test_a_run_that_stopped_and_was_killed_is_over_only_once_all_of_it_is_written(
    tmp_path, monkeypatch
):
    experiment = described(stop={"batches": 30}, evaluate={"bootstrap": 5})
    full = fl.run(experiment, tmp_path / "whole")
    run = tmp_path / "run"

    def killed(*_: Any) -> None:
        raise Killed

    for _ in range(2):  # as it writes its model, and once more in its next life
        with monkeypatch.context() as patch:
            patch.setattr("fedlens.runs.folder.RunFolder.save_model", killed)
            patch.setattr("fedlens.runs.loop.ActiveRun.stop", lambda *_: None)
            with pytest.raises(Killed):
                fl.resume(run, experiment=experiment) if run.exists() else fl.run(experiment, run)
        assert read_status(run) == "interrupted"
    found = fl.sweep({"run": experiment}, tmp_path)["run"]
    assert_same_run(run, tmp_path / "whole")
    assert found.summary["intervals"] == full.summary["intervals"]


def test_a_run_whose_time_was_up_when_it_was_interrupted_is_evaluated_at_its_end(tmp_path):
    evaluate = {"on": ["test", "validation"], "validation": 0.25, "every": 12}
    experiment = described(stop={"seconds": 1000.0}, evaluate=evaluate)
    run = tmp_path / "run"

    def kill(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise Killed

    with pytest.raises(Killed):
        fl.run(experiment, run, watch=kill)
    summary = json.loads((run / "summary.json").read_text())
    summary["seconds"]["total"] = 1001.0  # in the midst of a round
    (run / "summary.json").write_text(json.dumps(summary))
    result = fl.resume(run, experiment=experiment)
    assert result.summary["reason"].startswith("stop.seconds: 1,001 of 1,000")
    assert len(result.records) == 3 and "test_accuracy" in result.records[-1]
    assert (run / "evaluation.json").is_file()
    assert len(fl.resume(run, experiment=experiment).records) == 3


def test_a_run_that_has_stopped_is_not_ended_by_a_round_that_had_begun_meanwhile(monkeypatch):
    changes: dict[str, Any] = {"faults": {"absent": 0.4}}
    changes |= {"reporting": {"quorum": 1.0, "below_quorum": "stop"}}
    lengths = {seed: len(fl.run(described(seed=seed, **changes)).records) for seed in range(20)}
    seed = next(seed for seed, length in lengths.items() if length == 1)
    experiment = described(seed=seed, stop={"batches": 1}, **changes)
    expected = fl.run(experiment)
    assert expected.status == "finished" and len(expected.records) == 1
    monkeypatch.setattr("fedlens.runs.loop.rounds_ahead", lambda _: 1)  # as on a GPU
    found = fl.run(experiment)
    assert found.status == "finished" and found.summary["reason"] == expected.summary["reason"]


def test_the_best_model_is_the_one_after_its_round(tmp_path):
    evaluate = {"on": ["test", "validation"], "validation": 0.25, "best": True}
    result = fl.run(described(rounds=8, evaluate=evaluate), tmp_path / "run")
    best = result.summary["best"]["validation_accuracy"]
    until = fl.run(described(rounds=best["round"]))
    assert result.best_model is not None
    assert_equal(found=result.best_model, expected=until.model)
    assert_equal(found=load_file(tmp_path / "run" / "best.safetensors"), expected=until.model)
    assert fl.run(described(rounds=1)).best_model is None


def test_points_of_a_sweep_stop_one_by_one(tmp_path):
    base = described(engine="stacked", precision="fp64", stop={"batches": 40})
    points = fl.grid(base, {"local.batch_size": [4, 8]})
    together = fl.sweep(points, tmp_path)
    lengths = [len(result.records) for result in together.values()]
    assert lengths[0] < lengths[1]
    for name, found in together.items():
        alone = fl.run(points[name])
        assert len(alone.records) == len(found.records)
        for key, value in alone.model.items():
            torch.testing.assert_close(found.model[key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stop": {"patience": 3}, "evaluate": {}},
            'stop.patience is 3: add "validation" to evaluate.on',
        ),
        ({"evaluate": {"best": True}}, 'evaluate.best is True: add "validation" to evaluate.on'),
        ({"stop": {"accuracy": 0.5}, "evaluate": {"on": "train"}}, "stop.accuracy is 0.5: add"),
        ({"stop": {"accuracy": 70.0}}, "stop.accuracy is 70.0"),
        ({"stop": {"bytes": 0}}, "stop.bytes is 0"),
        ({"stop": {"rounds": 3}}, "unknown key 'stop.rounds'"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_in_a_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        described(**changes)
    assert "\n" not in str(caught.value)


def test_the_best_model_is_taken_away_from_the_shell(here, fedlens):
    Path("own.toml").write_text(
        'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 4\nengine = "sequential"\n'
        'clients = { count = 2 }\nlocal = { lr = { name = "piecewise", values = [0.05, 20.0], '
        'at = [1] } }\nevaluate = { on = ["test", "validation"], best = true }\n'
        "stop = { patience = 1 }\n"
    )
    done = fedlens("run", "own.toml", "--out", "run")
    reason = "stop.patience: the validation accuracy was best in round 1, 1 evaluation ago"
    assert f"ended:  {reason}\n" in done.out
    run = Path("run")
    last, best = (fl.load(run, best=best).module.state_dict() for best in (False, True))
    assert not torch.equal(last["fc.weight"], best["fc.weight"])
    fedlens("export", "run", "--best", "--out", "best.safetensors")
    exported = load_file("best.safetensors")
    assert any(torch.equal(t, best["fc.weight"]) for t in exported.values())
    assert "It is the model after round 1 of 2" in Path("best.safetensors.md").read_text()
    (run / "best.safetensors").unlink()
    with pytest.raises(ValueError, match=r"best\.safetensors"):
        fl.load(run, best=True)
