"""Runs whose clients have models of their own: what they are compared with."""

import json
from dataclasses import replace
from typing import Any

import pytest

import fedlens as fl
from fedlens.report.blocks import Curves
from fedlens.report.cautions import _of_clients
from fedlens.report.pairs import Score
from fedlens.report.personal import COMPARED, HEADER, personal_rows
from fedlens.report.runs import headline, run_blocks
from fedlens.report.tables import rows as rows_of
from fedlens.runs.records import read
from tests.toys import toy


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def described(algorithm, **evaluate):
    return fl.Experiment(
        dataset=toy(side=16),
        model="lenet5",
        rounds=3,
        engine="sequential",
        clients=fl.Clients(count=6, holdout=0.3),
        local=fl.LocalTraining(batch_size=4, lr=0.05),
        algorithm=algorithm,
        evaluate=fl.Evaluate(**evaluate),
    )


def by_clients(run):
    return json.loads((run / "clients.json").read_text())


def test_a_personal_run_is_compared_with_fedavg_tuned_and_not_and_with_clients_alone(tmp_path):
    result = fl.run(described("ditto"), tmp_path / "run")
    found = by_clients(tmp_path / "run")
    plain = described("fedavg", fine_tune=5, local_only=True)
    fl.run(plain, tmp_path / "fedavg")
    expected = by_clients(tmp_path / "fedavg")
    assert found["fedavg"] == expected["federated"]
    assert found["fedavg_fine_tuned"] == expected["fine_tuned"]
    assert found["local_only"] == expected["local_only"]
    final = result.summary["final"]
    assert final["personal_accuracy"] == pytest.approx(sum(found["federated"]) / 6)
    assert final["personal_accuracy"] == pytest.approx(final["client_accuracy_mean"])
    better = sum(a > b for a, b in zip(found["federated"], found["local_only"], strict=True))
    assert final["better_than_alone"] == pytest.approx(better / 6)
    assert all(0 <= share <= 1 for share in found["elsewhere"])
    assert result.summary["against"].keys() == {"local_only", "fedavg", "fedavg_fine_tuned"}


@pytest.mark.parametrize("algorithm", ["ditto", "fine-tune", "fedper"])
def test_what_it_forgot_is_its_accuracy_on_the_images_of_all_others(algorithm, tmp_path):
    """Nothing is learned here, so every client has one and the same model."""
    still = replace(described(algorithm), local=fl.LocalTraining(lr=0.0))
    fl.run(still, tmp_path / "run")
    found, tested = by_clients(tmp_path / "run"), read(tmp_path / "run").evaluation["client_tested"]
    right = [share * count for share, count in zip(found["federated"], tested, strict=True)]
    for client, share in enumerate(found["elsewhere"]):
        others = sum(right) - right[client], sum(tested) - tested[client]
        assert share == pytest.approx(others[0] / others[1])


def test_what_it_is_compared_with_is_trained_once(tmp_path):
    told: list[dict[str, Any]] = []
    fl.run(described("ditto"), tmp_path / "ditto")
    fl.run(described("apfl"), tmp_path / "apfl", watch=told.append, progress=False)
    assert not any("baseline" in record or "alone" in record for record in told)
    one, other = by_clients(tmp_path / "ditto"), by_clients(tmp_path / "apfl")
    for name in ("fedavg", "fedavg_fine_tuned", "local_only"):
        assert one[name] == other[name]
    told.clear()
    more = replace(described("ditto"), clients=fl.Clients(count=6, holdout=0.3, per_round=3))
    fl.run(more, watch=told.append, progress=False)
    assert [r["baseline"] for r in told if "baseline" in r] == [1, 2, 3]


@pytest.mark.parametrize("algorithm", ["fedbabu", "fine-tune", "per-fedavg"])
def test_a_model_that_is_tuned_at_the_end_is_measured_then(algorithm, tmp_path):
    passes = {"fedbabu": 5, "fine-tune": 5, "per-fedavg": 1}[algorithm]
    fl.run(described(algorithm, baselines=False), tmp_path / "run")
    fl.run(described(algorithm, fine_tune=passes, baselines=False), tmp_path / "b")
    found = by_clients(tmp_path / "run")
    assert found["federated"] == by_clients(tmp_path / "b")["fine_tuned"]
    assert found.keys() == {"federated"}


def test_fine_tuning_is_the_tuned_baseline_itself(tmp_path):
    fl.run(described("fine-tune"), tmp_path / "run")
    found = by_clients(tmp_path / "run")
    assert found["federated"] == found["fedavg_fine_tuned"]


def test_without_baselines_or_tests_nothing_more_is_trained(tmp_path, caplog):
    fl.run(described("ditto", baselines=False), tmp_path / "run")
    assert not (tmp_path / "run" / "clients.json").exists()
    untested = replace(described("ditto"), clients=fl.Clients(count=6))
    assert not caplog.messages
    fl.run(untested, tmp_path / "untested")
    assert not (tmp_path / "untested" / "clients.json").exists()
    (line,) = caplog.messages
    assert "ditto" in line and "clients.holdout" in line


def test_the_page_and_the_terminal_say_whether_it_was_worth_it(tmp_path):
    result = fl.run(described("ditto", twin=True), tmp_path / "run")
    assert "centralised" in result.summary["against"]
    run = read(tmp_path / "run")
    shown = dict(zip(*(rows_of([run])[0], rows_of([run])[1][0]), strict=True))
    assert shown["personal accuracy"] == f"{100 * result.final['personal_accuracy']:.1f}%"
    assert "best accuracy (round)" not in shown, "it would be chosen by the test images"
    rows = {row[0]: dict(zip(HEADER, row, strict=True)) for row in personal_rows(run)}
    assert list(rows)[1:] == [words for words in COMPARED.values() if words]
    found = by_clients(tmp_path / "run")
    shares = found["fedavg"]
    assert rows["FedAvg, one model"]["mean"] == f"{100 * sum(shares) / 6:.1f}%"
    better = sum(a > b for a, b in zip(shares, found["local_only"], strict=True))
    assert rows["FedAvg, one model"]["better than alone"] == f"{better} of 6"
    blocks = {block.title: block for block in run_blocks([run])}
    dots = blocks["Alone or together"]
    assert isinstance(dots, Curves)
    assert dots.lines[0].x == sorted(found["local_only"])
    assert sum(y or 0.0 for y in dots.lines[0].y) == pytest.approx(sum(found["federated"]))
    assert "Was it worth it to federate?" in blocks
    for what in ("size", "EMD"):
        gains = blocks[f"Who gains, by {what}"]
        assert isinstance(gains, Curves)
        both = zip(found["federated"], found["local_only"], strict=True)
        expected = sorted(100 * (a - b) for a, b in both)
        assert sorted(y or 0.0 for y in gains.lines[0].y) == pytest.approx(expected)
    slopes = blocks["From method to method"]
    assert isinstance(slopes, Curves) and len(slopes.lines) == 6
    assert slopes.ticks == ["alone", "FedAvg", "FedAvg, tuned", "ditto"]
    for line in slopes.lines:
        client = int(line.name.split()[1])
        keys = ("local_only", "fedavg", "fedavg_fine_tuned", "federated")
        assert line.y == [found[key][client] for key in keys]
    fl.run(described("fedavg"), tmp_path / "plain")
    assert not personal_rows(read(tmp_path / "plain"))


def test_personal_runs_are_told_and_compared_by_clients_own_models_after_the_last_round(tmp_path):
    ends = {}
    for name in ("fine-tune", "fedavg"):
        final = fl.run(described(name, baselines=False), tmp_path / name).final
        ends[name] = final.get("personal_accuracy", final["client_accuracy_mean"])
    runs = [read(tmp_path / name) for name in ends]
    page = {block.title: block for block in run_blocks(runs[:1])}
    assert f"{100 * ends['fine-tune']:.1f}% accuracy with clients' own models" in headline(runs[:1])
    curve = page["Test accuracy"]
    assert isinstance(curve, Curves) and curve.lines[0].ring is None and "best" not in str(curve)
    score = Score.of(runs, "test", None)
    assert [score(run) for run in runs] == pytest.approx([*ends.values()])
    with pytest.raises(ValueError, match="last"):
        Score.of(runs, "test", 2)
    assert Score.of(runs[1:], "test", None).metric == "test_accuracy"


def with_unseen(algorithm, **evaluate):
    clients = fl.Clients(count=6, holdout=0.3, unseen=0.34)
    return replace(described(algorithm, **evaluate), clients=clients)


def test_unseen_clients_never_train_and_adapt_the_final_model(tmp_path):
    result = fl.run(with_unseen("fedavg", fine_tune=3), tmp_path / "run")
    found = by_clients(tmp_path / "run")
    took_part = {client for record in result.records for client in record["clients"]}
    new = {client for client, is_new in enumerate(found["unseen"]) if is_new}
    assert len(new) == 2 and took_part == set(range(6)) - new
    tuned = [found["fine_tuned"][client] for client in new]
    assert [found["federated"][client] for client in new] == tuned
    assert result.final["unseen_accuracy"] == pytest.approx(sum(tuned) / 2)
    assert result.summary["against"]["fine_tuned"]["clients"] == 4
    for record in result.records:
        measured = [share for share in record["client_accuracy"] if share is not None]
        assert len(measured) == 4
        assert record["client_accuracy_mean"] == pytest.approx(sum(measured) / 4)
    assert {name for name, _ in _of_clients(read(tmp_path / "run"), "federated").items()} == {
        f"client {client}" for client in set(range(6)) - new
    }


def test_many_clients_are_drawn_in_fifths(tmp_path):
    many = replace(described("ditto"), clients=fl.Clients(count=12, holdout=0.3))
    fl.run(many, tmp_path / "run")
    blocks = {block.title: block for block in run_blocks([read(tmp_path / "run")])}
    slopes = blocks["From method to method"]
    assert isinstance(slopes, Curves) and len(slopes.lines) == 5


def test_the_table_has_rows_for_new_clients(tmp_path):
    result = fl.run(with_unseen("ditto"), tmp_path / "run")
    rows = {
        row[0]: dict(zip(HEADER, row, strict=True)) for row in personal_rows(read(tmp_path / "run"))
    }
    mean = rows["ditto, a model for each, new clients"]["mean"]
    assert mean == f"{100 * result.final['unseen_accuracy']:.1f}%"
    assert rows["ditto, a model for each"]["better than alone"].endswith("of 4")


@pytest.mark.parametrize("other", [{"name": "fedvc", "size": 8}, {"name": "fedbuff", "buffer": 2}])
def test_unseen_clients_and_another_choice_of_clients_exclude_each_other(other):
    with pytest.raises(ValueError, match="unseen"):
        fl.run(with_unseen(other))


def test_unseen_clients_need_tests_and_somebody_to_train():
    untested = replace(described("fedavg"), clients=fl.Clients(count=6, unseen=0.3))
    with pytest.raises(ValueError, match="unseen"):
        fl.run(untested)
    with pytest.raises(ValueError, match="per_round"):
        fl.Clients(count=6, unseen=0.5, per_round=4)
