"""Clients by themselves: trained alone, and fine-tuned from the final model."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.evaluation.intervals import bootstrap, bootstrap_mean
from fedlens.fleet.terms import check_possible
from fedlens.report.blocks import Curves, Intervals, Table
from fedlens.report.holdings import client_header, client_rows, worth
from fedlens.report.runs import run_blocks
from fedlens.runs.progress import in_rounds
from fedlens.runs.records import read
from tests.later import Later
from tests.toys import toy

stats = Later("scipy.stats")


def described(**evaluate):
    return fl.Experiment(
        dataset=toy(),
        model="linear",
        rounds=3,
        engine="sequential",
        clients=fl.Clients(count=8, holdout=0.3),
        local=fl.LocalTraining(batch_size=4, lr=0.05),
        evaluate=fl.Evaluate(**evaluate),
    )


def by_clients(run):
    return json.loads((run / "clients.json").read_text())


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
def test_a_client_alone_is_a_federation_of_that_client(engine, tmp_path):
    """With one client, training alone is the run itself; and fine-tuning one pass is one more."""
    one = replace(
        described(local_only=True, fine_tune=1),
        engine=engine,
        clients=fl.Clients(count=1, holdout=0.3),
        rounds=2,
    )
    result = fl.run(one, tmp_path / "run")
    found = by_clients(tmp_path / "run")
    assert found["local_only"] == found["federated"]
    assert found["federated"] == [result.final["client_accuracy_mean"]]
    assert result.summary["against"]["local_only"]["gain"] == 0
    assert result.summary["against"]["local_only"]["gain_interval"] is None


def test_clients_alone_are_as_good_as_runs_of_each_by_itself(tmp_path):
    experiment = described(local_only=True)
    fl.run(experiment, tmp_path / "run")
    setup = fl.setup.build(experiment)
    assert setup.client_tests is not None
    held, tests = setup.federation.everyone(0), setup.client_tests.holdings
    dataset = setup.dataset
    for client, accuracy in enumerate(by_clients(tmp_path / "run")["local_only"]):
        own = fl.Dataset(
            "own",
            dataset.train.take(held.members(client)),
            dataset.train.take(tests.members(client)),
            dataset.classes,
        )
        by_itself = replace(experiment, dataset=own, clients=fl.Clients(count=1), evaluate={})
        assert fl.run(by_itself).final["test_accuracy"] == pytest.approx(accuracy)


def test_fine_tuning_goes_on_from_the_final_model(tmp_path):
    """Without a learning rate nothing moves; clients alone then stay at the initial model."""
    still = replace(described(fine_tune=2), local=fl.LocalTraining(lr=0.0))
    fl.run(still, tmp_path / "run")
    found = by_clients(tmp_path / "run")
    assert found["fine_tuned"] == found["federated"]
    assert "local_only" not in found


def test_the_summary_counts_who_gains(tmp_path):
    result = fl.run(described(local_only=True, fine_tune=1), tmp_path / "run")
    found = by_clients(tmp_path / "run")
    for name, about in result.summary["against"].items():
        pairs = list(zip(found["federated"], found[name], strict=True))
        assert about["federated_better"] == sum(a > b for a, b in pairs)
        assert about["own_better"] == sum(a < b for a, b in pairs)
        assert about["gain"] == pytest.approx(sum(a - b for a, b in pairs) / 8)
        low, high = about["gain_interval"]
        assert low <= about["gain"] <= high
    again = fl.resume(tmp_path / "run", experiment=described(local_only=True, fine_tune=1))
    assert again.summary["against"].keys() == result.summary["against"].keys()


def test_the_page_and_the_terminal_say_who_is_left_behind(tmp_path):
    asked = described(local_only=True, fine_tune=1, bootstrap=5, metrics=["ece"])
    result = fl.run(asked, tmp_path / "run")
    part = json.loads((tmp_path / "run" / "partition.json").read_text())
    part["client_names"] = [f"site {k}" for k in range(8)]
    (tmp_path / "run" / "partition.json").write_text(json.dumps(part))
    run = read(tmp_path / "run")
    header, rows = client_header(run), client_rows(run)
    assert header[-2:] == ["fine-tuned", "alone"]
    assert all(len(row) == len(header) for row in rows)
    about = result.summary["against"]["local_only"]
    (line,) = [line for line in worth(run) if "alone" in line]
    assert f"better for {about['federated_better']} of 8 clients" in line
    assert f"gain {100 * about['gain']:+.1f} points" in line
    blocks = {block.title: block for block in run_blocks([run])}
    behind = blocks["Who is left behind"]
    assert isinstance(behind, Intervals)
    assert [one.name for one in behind.series] == ["federated", "fine-tuned", "alone"]
    federated = [value for value in behind.series[0].values if value is not None]
    assert federated == sorted(by_clients(tmp_path / "run")["federated"])
    for marks in behind.series:
        assert None not in (*marks.low, *marks.high)
    assert len(behind.rows) == 8
    intervals = blocks["Intervals"]
    assert isinstance(intervals, Table)
    assert [row[0] for row in intervals.rows] == list(result.summary["intervals"])
    reliability = blocks["Reliability"]
    assert isinstance(reliability, Curves)
    assert all(0 <= y <= 1 for y in reliability.lines[0].y if y is not None)


def test_without_tests_of_clients_there_is_nothing_to_compare():
    untested = replace(described(local_only=True), clients=fl.Clients(count=4))
    with pytest.raises(ValueError, match=r"evaluate\.local_only"):
        fl.run(untested)


def test_the_interval_of_an_accuracy_is_the_binomials():
    right = torch.arange(200) < 140
    found = bootstrap(lambda drawn: {"accuracy": float(right[drawn].double().mean())}, 200, 2000, 0)
    low, high = stats.binom(200, 0.7).ppf([0.025, 0.975]) / 200
    assert found["accuracy"] == pytest.approx((low, high), abs=0.011)


def test_the_summary_has_an_interval_for_each_final_measure():
    asked = {"bootstrap": 30, "metrics": ["auroc", "kappa"]}
    summary = fl.run(described(**asked)).summary
    final = summary["final"]
    assert summary["intervals"].keys() == final.keys() - {"train_loss"}
    for name in ("test_accuracy", "test_loss", "test_auroc", "client_accuracy_mean"):
        low, high = summary["intervals"][name]
        assert low <= final[name] <= high
    assert fl.run(described(**asked)).summary["intervals"] == summary["intervals"]
    assert "intervals" not in fl.run(described()).summary


def test_the_interval_of_a_mean_is_that_of_the_normal_for_many():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap_mean(values, seed=0) or (0.0, 0.0)
    half = 1.96 * float(values.std()) / 20
    assert low == pytest.approx(float(values.mean()) - half, abs=0.02)
    assert high == pytest.approx(float(values.mean()) + half, abs=0.02)


@pytest.mark.parametrize("asked", [{"local_only": True}, {"fine_tune": 1}])
def test_sites_of_a_fleet_train_no_models_of_their_own(asked):
    with pytest.raises(ValueError, match=r"evaluate\.local_only"):
        check_possible(replace(described(**asked), dataset="fashion-mnist-mini"))


def test_the_twin_is_told_client_by_client_also_from_the_cache(tmp_path, monkeypatch):
    """Of one client it is the client's own model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    experiment = described(twin=True)
    for name in ("first", "cached"):
        result = fl.run(experiment, tmp_path / name)
        found, evaluation = by_clients(tmp_path / name), read(tmp_path / name).evaluation
        assert result.summary["twin"]["cached"] is (name == "cached")
        assert len(found["centralised"]) == 8 and "against" not in result.summary
        assert found["federated"] == pytest.approx(evaluation["client_accuracy"])
        assert client_header(read(tmp_path / name))[-1] == "centralised"
    assert by_clients(tmp_path / "first") == by_clients(tmp_path / "cached")
    alone = replace(described(twin=True, local_only=True), clients=fl.Clients(count=1, holdout=0.3))
    fl.run(alone, tmp_path / "one")
    one = by_clients(tmp_path / "one")
    assert one["centralised"] == one["local_only"]


def test_what_is_trained_besides_tells_how_far_it_is(capsys):
    told: list[dict[str, Any]] = []
    fl.run(described(local_only=True), watch=told.append, progress=False)
    passes = [record["alone"] for record in told if "alone" in record]
    assert passes == [1, 2, 3] and told[-1] == {"alone": 3, "of": 3}
    with in_rounds("x", 3) as watch:
        for record in told:
            watch(record)
    assert "x: training clients by themselves, pass 3/3\n" in capsys.readouterr().err


def test_fine_tuning_is_called_that_while_it_goes_on(capsys):
    told: list[dict[str, Any]] = []
    fl.run(described(fine_tune=2), watch=told.append, progress=False)
    assert told[-1] == {"tuned": 2, "of": 2}
    with in_rounds("x", 3) as watch:
        watch(told[-1])
    assert capsys.readouterr().err == "x: fine-tuning each client's model, pass 2/2\n"


LEFT_OUT = (
    "2 of 4 clients have no images of their own to be tested on (clients.holdout = 0.3 takes none "
    "of fewer than 4): accuracies by client leave them out"
)


def with_small_clients():
    made = toy()
    names = np.array(["a", "b", "b", "c", "c", "c", "c", *["d"] * (len(made.train) - 7)])
    named = replace(made, train=replace(made.train, columns={"who": names}))
    clients = fl.Clients(partition=fl.Named("natural", {"column": "who"}), holdout=0.3)
    return replace(described(local_only=True), dataset=named, clients=clients)


def test_test_images_of_those_who_train_nothing_are_told_of(caplog):
    made = toy()
    train, test = (
        replace(part, columns={"site": np.array([*["north"] * 4, *[other] * (len(part) - 4)])})
        for part, other in ((made.train, "south"), (made.test, "west"))
    )
    sites = fl.Clients(partition=fl.Named("natural", {"column": "site"}))
    of_sites = replace(made, train=train, test=test)
    fl.run(replace(described(), dataset=of_sites, clients=sites))
    count = len(test) - 4
    assert (
        f"{count} of {len(test)} test images belong to nobody who trains (site west): "
        "they count in accuracy, and accuracies by client leave them out"
    ) in caplog.messages


def test_classes_that_are_trained_on_and_never_tested_are_named(caplog):
    made = toy()
    kept = (made.test.labels != 1).nonzero().flatten()
    fl.run(replace(described(), dataset=replace(made, test=made.test.take(kept))))
    assert caplog.messages == [
        f"1 of {made.num_classes} classes has no test images ({made.classes[1]}): "
        "accuracy and macro F1 say nothing of how the model does there"
    ]


def test_how_many_clients_are_too_small_to_be_tested_is_said_once(caplog):
    assert fl.run(with_small_clients()).status == "finished"
    assert caplog.messages == [LEFT_OUT]
    caplog.clear()
    fl.sweep({"a": with_small_clients(), "b": replace(with_small_clients(), rounds=2)})
    assert caplog.messages == [LEFT_OUT]
    caplog.clear()
    assert fl.run(described(local_only=True)).status == "finished"
    assert caplog.messages == []
