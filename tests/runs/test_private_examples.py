"""Runs that protect single examples: what they cost, say, keep, and refuse."""

import json
import math
from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.events import Release
from fedlens.privacy.ledger import Ledger, Limit
from fedlens.report import report
from fedlens.setup import build
from tests.federations import assert_equal

DELTA = 1e-4


def experiment(privacy: dict[str, Any] | None = None, **changes: Any) -> fl.Experiment:
    tables: dict[str, Any] = {
        "dataset": "fashion-mnist-mini",
        "model": "linear",
        "rounds": 3,
        "clients": {"count": 20, "per_round": 5},
        "local": {"batch_size": 30},
        "privacy": {"unit": "example", "noise": 1.0, "delta": DELTA, **(privacy or {})},
        "engine": "sequential",
    }
    return fl.Experiment.of(tables | changes)


def turns(result: fl.Result) -> int:
    """Of the client that took part most often."""
    clients = [client for record in result.records for client in record["clients"]]
    return max(map(clients.count, clients))


def spent(rounds: int, noise: float = 1.0, rate: float = 0.1) -> float:
    """300 examples, batches of 30, an epoch a round."""
    return epsilon([Release(noise, "poisson", rate, count=10 * rounds)], DELTA)


def test_the_client_that_takes_part_most_often_is_what_counts(tmp_path):
    result = fl.run(experiment(rounds=6), tmp_path / "run")
    told = result.summary["privacy"]
    assert turns(result) > 1
    assert told["epsilon"] == pytest.approx(spent(turns(result)), rel=1e-9)
    assert told["epsilon"] == result.records[-1]["epsilon"] == told["by_client"]["most"]
    assert (told["unit"], told["sampling"], told["neighbouring"]) == (
        *("example", "poisson"),
        "add-remove",
    )
    assert not {"train_loss", "loss"} & result.records[-1].keys()
    page = report([tmp_path / "run"]).read_text()
    shown = f"at most {math.ceil(100 * told['epsilon']) / 100:.2f} at δ = 0.0001 for each example"
    assert shown in page and "against the server" in page
    assert "how many examples each client holds" in page


def test_the_noise_for_an_epsilon_counts_turns_and_sizes(tmp_path):
    described = experiment(
        {"noise": None, "epsilon": 5.0},
        clients={"count": 6, "per_round": 3, "partition": {"name": "power-law", "exponent": 1.2}},
    )
    result = fl.run(described, tmp_path / "run")
    told = result.summary["privacy"]
    assert 4.97 < told["epsilon"] <= 5.0
    assert told["by_client"]["least"] < told["by_client"]["median"] <= told["by_client"]["most"]
    again = fl.run(described)
    assert_equal(found=again.model, expected=result.model)


def test_clients_in_turns_take_part_equally_often():
    result = fl.run(experiment({"sampling": "cyclic"}, rounds=8))
    assert turns(result) == 2
    assert result.summary["privacy"]["epsilon"] == pytest.approx(spent(2), rel=1e-9)


ALGORITHMS: list[Any] = [
    "fedavg",
    "fedavgm",
    {"name": "fedprox", "mu": 0.1},
    {"name": "fedvc", "size": 60},
    "fedns",
    "lastfc",
    {"name": "fedadmm", "rho": 0.1},
    "scaffold",
    "feddyn",
    "fednova",
    "median",
    "qfedavg",
    {"name": "clip", "norm": 0.5},
    {"name": "quantize", "bits": 8},
    {"name": "top-k", "share": 0.1},
    "fedadam",
    "fedcm",
    "fedper",
]


def name_of(algorithm: Any) -> str:
    return algorithm if isinstance(algorithm, str) else str(algorithm["name"])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_algorithms_run_or_are_refused_in_a_line(algorithm):
    counts = {"count_noise": 5.0} if algorithm in ("fedns", "lastfc") else {}
    described = experiment(counts, algorithm=algorithm, rounds=2, model="lenet5")
    if name_of(algorithm) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name_of(algorithm)]) as told:
            build(described)
        assert "\n" not in str(told.value)
        return
    result = fl.run(described)
    assert result.status == "finished"
    assert all(p.isfinite().all() for p in result.model.values())
    known = {"round", "batches", "batches_total", "examples", "clients", "bytes_up", "bytes_down"}
    known |= {"seconds", "evaluation_seconds", "epsilon"}
    more = {key for key in result.records[0].keys() - known if not key.startswith("test_")}
    assert more <= {"dual_residual"}  # of the server's model


REFUSED = {"qfedavg": "leave"}


@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_engines_agree_on_what_is_spent_and_trained(engine):
    expected = fl.run(experiment(model="lenet5", rounds=2))
    found = fl.run(experiment(model="lenet5", rounds=2, engine=engine, device="cpu"))
    assert found.summary["privacy"] == expected.summary["privacy"]
    for name, value in expected.model.items():
        torch.testing.assert_close(found.model[name], value, rtol=1e-4, atol=1e-5)


def test_a_resumed_run_is_the_whole_run_to_the_byte(tmp_path):
    whole = fl.run(experiment(rounds=4), tmp_path / "whole")
    fl.run(experiment(rounds=2), tmp_path / "run")
    resumed = fl.resume(tmp_path / "run", rounds=4)
    assert_equal(found=resumed.model, expected=whole.model)
    assert resumed.summary["privacy"] == whole.summary["privacy"]
    fl.run(experiment({"noise": None, "epsilon": 8.0}, rounds=2), tmp_path / "other")
    with pytest.raises(ValueError, match="noise for 2 rounds"):
        fl.resume(tmp_path / "other", rounds=3)


def test_points_of_a_sweep_have_their_own_noise_side_by_side(tmp_path):
    points = {
        str(noise): experiment({"noise": noise}, engine="stacked", device="cpu", rounds=2)
        for noise in (0.5, 2.0)
    }
    for name, result in fl.sweep(points, tmp_path / "sweep").items():
        alone = fl.run(points[name])
        assert result.summary["privacy"] == alone.summary["privacy"]
        for name, value in alone.model.items():
            torch.testing.assert_close(result.model[name], value, rtol=1e-4, atol=1e-5)


def test_a_ledger_keeps_examples_apart_from_clients_and_stops_in_time(tmp_path):
    file = tmp_path / "ledger.jsonl"
    kept = {"ledger": str(file)}
    everyone = {"count": 20}
    Ledger(file).set_limit(Limit(spent(2) + 1e-3, DELTA))
    result = fl.run(experiment(kept, clients=everyone), tmp_path / "run")
    assert (result.status, len(result.records)) == ("finished", 2)
    assert "round 3 would pass the limit" in result.summary["reason"]
    assert {one.unit for one in Ledger(file).entries} == {"example"}
    counted = experiment({**kept, "count_noise": 9.0}, clients=everyone, algorithm="lastfc")
    with pytest.raises(ValueError, match="limit"):
        fl.run(counted)


def test_label_counts_are_in_the_ledger_once(tmp_path):
    kept = {"ledger": str(tmp_path / "ledger.jsonl"), "count_noise": 9.0}
    fl.run(experiment(kept, algorithm="lastfc", rounds=2), tmp_path / "run")
    resumed = fl.resume(tmp_path / "run", rounds=3)
    entries = Ledger(tmp_path / "ledger.jsonl").entries
    assert [one.round for one in entries if one.release == Release(9.0)] == [0]
    steps = [one.release.count for one in entries if one.round]
    assert sum(steps) == 10 * turns(resumed)


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"noise": None, "epsilon": 0.0}, {}, "epsilon"),
    ({"delta": 1 / 300}, {}, "delta"),
    ({"clip": 0.0}, {}, "clip"),
    ({"clip": "adaptive"}, {}, "clip"),
    ({"mechanism": "tree"}, {}, "mechanism"),
    ({"mechanism": {"name": "banded", "bands": 2}}, {}, "mechanism"),
    ({"noise_cohort": 1000}, {}, "noise_cohort"),
    ({"sampling": "fixed"}, {}, "sampling"),
    ({"count_noise": 3.0}, {}, "no effect"),
    ({"unit": "client", "count_noise": 3.0}, {}, "count_noise"),
    ({}, {"algorithm": "fedns"}, "count_noise"),
    ({}, {"algorithm": "fedir"}, "weigh"),
    ({}, {"algorithm": "liadmm"}, "leave"),
    ({}, {"algorithm": "fedbuff"}, "asynchronous"),
    ({}, {"local": {"batch_size": 30, "class_balance": 0.9}}, "class_balance"),
    ({}, {"local": {"epochs": {"low": 1, "high": 3}}}, "as many steps"),
    ({}, {"augment": {"mixup": 0.2}}, "mixup"),
    ({}, {"evaluate": {"on": ["train", "test"]}}, "train"),
    ({}, {"faults": {"dropout": 0.1}}, "faults"),
    ({}, {"clients": {"count": 20, "holdout": 0.1}}, "holdout"),
    ({}, {"clients": {"count": 20, "partition": {"name": "fresh", "per_class": 3}}}, "partition"),
    ({}, {"model": "mobilenetv2", "norm": "batch"}, "group"),
    ({"sampling": "cyclic"}, {"algorithm": {"name": "fedvc", "size": 60}}, "cyclic"),
]


@pytest.mark.parametrize(
    ("privacy", "changes", "key"), WRONG, ids=[f"{p} {c}"[:60] for p, c, _ in WRONG]
)
def test_a_mistake_is_one_line_before_anything_is_written(privacy, changes, key, tmp_path):
    with pytest.raises(ValueError, match=key) as told:
        fl.run(experiment(privacy, **changes), tmp_path / "run")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_other_keys_of_privacy_do_not_go_on(tmp_path):
    fl.run(experiment(rounds=1), tmp_path / "run")
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace('unit = "example"', 'unit = "client"'))
    with pytest.raises(ValueError, match=r"privacy\.unit"):
        fl.resume(tmp_path / "run", rounds=2)


def test_the_summary_is_json_also_without_noise(tmp_path):
    fl.run(experiment({"noise": 0.0}, rounds=1), tmp_path / "run")
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert told["epsilon"] is None
    assert "without bound" in report([tmp_path / "run"]).read_text()
