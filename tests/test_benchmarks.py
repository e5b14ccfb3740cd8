"""What benchmarks write."""

import json
import sys
from dataclasses import replace

import by_fedlens
import pytest

import personal_rounds
import recording
import whole_runs
from fedlens.config.experiment import Clients
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.setup import build
from tests.federations import ENGINES, FEW, noisy_images, small_cnn


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("sequential", "engine sequential, workers: 1"),
        ("processes, three workers", "engine processes, workers: 3"),
    ],
)
def test_a_row_beside_peers_says_how_many_workers_there_were(name, label):
    engine = ENGINES[name](Network(small_cnn()), noisy_images(FEW).examples)
    try:
        assert by_fedlens.label(engine) == label
    finally:
        engine.close()


def test_a_benchmark_that_is_cut_short_leaves_what_it_had(tmp_path, monkeypatch, capsys):
    told = iter([4.0, 4.5, 3.0, 3.5, 2.0, 5.0])

    def timed(*_: object) -> dict[str, float]:
        seconds = next(told, None)
        if seconds is None:
            raise KeyboardInterrupt
        return {"total": seconds, "cpu": seconds}

    for name in ("by_fedlens", "in_parts", "by_others"):
        monkeypatch.setattr(whole_runs, name, timed)
    words = ["--only", "quickstart", "--repeats", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["whole_runs.py", *words])
    with pytest.raises(KeyboardInterrupt):
        whole_runs.main()
    kept = json.loads((tmp_path / "out" / "whole_runs.json").read_text())
    assert kept["torch"] and kept["command"].endswith(f"--out {tmp_path / 'out'}")
    assert [(one["by"], one["total"], one["n"]) for one in kept["rows"]] == [
        ("Fedlens, first start", 4.0, 1),
        ("parts of a first start", 4.5, 1),
        ("Fedlens, second start", 3.0, 1),
        ("parts of a second start", 3.5, 1),
        ("loop by hand", 2.0, 1),
    ]
    assert "loop by hand | 2.0" in (tmp_path / "out" / "whole_runs.md").read_text()
    assert capsys.readouterr().err.endswith("repeat 2: Fedlens, first start 5.0 s\n")


def test_rounds_are_timed_one_by_one_alone_and_side_by_side(monkeypatch, capsys):
    for name, value in {"CLIENTS": 2, "BATCH": 2, "EPOCHS": 2}.items():
        monkeypatch.setattr(recording, name, value)
    words = ["--device", "cpu", "--steps", "2", "4", "--rounds", "2", "--json"]
    monkeypatch.setattr(sys, "argv", ["recording.py", *words])
    recording.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["steps"], row["experiments"]) for row in rows] == [(2, 1), (2, 3), (4, 1), (4, 3)]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)


def test_steps_that_are_no_whole_epochs_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recording.py", "--device", "cpu", "--steps", "15"])
    with pytest.raises(SystemExit):
        recording.main()
    assert "--steps: choose multiples of 10" in capsys.readouterr().err


@pytest.mark.parametrize("method", personal_rounds.METHODS)
def test_the_loop_beside_personal_rounds_does_the_same_work(method, monkeypatch):
    """On whole batches, in which the order of images plays no role."""
    monkeypatch.setattr(personal_rounds, "BATCH", 10_000)
    monkeypatch.setattr(personal_rounds, "LR", 0.05)
    told = personal_rounds.experiment(method, "fashion-mnist-mini", "cpu")
    clients = Clients(count=4, holdout=0.9, partition="iid")
    setup = build(replace(told, engine="sequential", clients=clients))
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    for _ in range(2):
        state, _ = run_round(setup.program, setup.federation, setup.engine, state, 0)
    one_round, server, owns = personal_rounds.by_hand(method, setup)
    for _ in range(2):
        one_round()
    own = setup.program.algorithm.model_of(state.params, state.clients.rows.get(3, {}))
    start = setup.network.params
    for module, model in [(server, state.params), (owns[3], own)]:
        for name, p in module.named_parameters():
            away, apart = model[name] - start[name], p.detach() - model[name]
            assert apart.norm() <= 1e-3 * away.norm(), name
