"""Runs whose clients fail: described, resumed, stopped, side by side."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens.config.names import OUTCOMES
from tests.toys import toy


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"faults": {"nan": 1.5}}, "faults.nan is 1.5"),
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
    stopped, records = result.summary["stopped_round"], result.records
    assert (stopped["round"], stopped["attempts"]) == (len(records) + 1, 1)
    assert sum(map(len, stopped["failed"].values())) == 4  # all that were asked
    dropped = sum(len(record["failed"].get("dropped", ())) for record in [*records, stopped])
    assert result.summary["outcomes"]["dropped"] == dropped


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
