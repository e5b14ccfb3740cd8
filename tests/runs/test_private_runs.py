"""Runs with privacy: what their records, summaries, pages and ledgers say."""

import json
import math
from dataclasses import replace
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.events import Release
from fedlens.privacy.ledger import Ledger, Limit
from fedlens.report import report
from fedlens.setup import build

RELEASE = Release(1.0, "poisson", 0.25)


def spent(rounds: int) -> float:
    return epsilon([Release(1.0, "poisson", 0.25, count=rounds)], 1e-5)


def experiment(privacy: dict[str, Any] | None = None, **changes: Any) -> fl.Experiment:
    tables: dict[str, Any] = {
        "dataset": "fashion-mnist-mini",
        "model": "linear",
        "rounds": 4,
        "clients": {"count": 20, "per_round": 5},
        "privacy": {"noise": 1.0, **(privacy or {})},
        "engine": "sequential",
        "evaluate": {"every": 3},
    }
    return fl.Experiment.of(tables | changes)


def test_every_evaluated_round_says_what_was_spent_so_far(tmp_path):
    result = fl.run(experiment(), tmp_path / "run")
    found = {r["round"]: r["epsilon"] for r in result.records if "epsilon" in r}
    assert found == pytest.approx({3: spent(3), 4: spent(4)}, rel=1e-9)
    told = result.summary["privacy"]
    assert told["epsilon"] == pytest.approx(spent(4), rel=1e-9)
    assert (told["unit"], told["delta"], told["noise"]) == ("client", 1e-5, 1.0)
    assert (told["sampling"], told["neighbouring"]) == ("poisson", "add-remove")
    assert told["mechanism"] == "gaussian" and len(told["not_covered"]) >= 4
    page = report([tmp_path / "run"]).read_text()
    shown = f"ε is at most {math.ceil(100 * spent(4)) / 100:.2f} at δ = 1e-05 for each client"
    assert shown in page and "What leaves, and under which guarantee" in page
    assert "Privacy spent" in page


def test_noise_for_a_larger_federation_is_said_to_be_that(tmp_path):
    larger = {"noise_cohort": 1000, "population": 10**5, "delta": 1e-6}
    result = fl.run(experiment(larger, rounds=1), tmp_path / "run")
    told = result.summary["privacy"]
    assert (told["noise_cohort"], told["clients"]) == (1000, 10**5)
    assert told["epsilon"] == pytest.approx(epsilon([Release(1.0, "poisson", 0.01)], 1e-6))
    assert "100,000" in told["not_covered"][0]
    assert (
        "of a federation of 100,000 with 1,000 in a round" in report([tmp_path / "run"]).read_text()
    )


def test_several_private_runs_are_drawn_by_accuracy_over_epsilon(tmp_path):
    for noise in (0.5, 2.0):
        fl.run(experiment({"noise": noise}, rounds=2), tmp_path / f"noise-{noise}")
    page = report([tmp_path / "noise-0.5", tmp_path / "noise-2.0"]).read_text()
    assert "Accuracy by ε" in page and "at the end" in page


def users(count: int) -> fl.Examples:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 1, 12, 12), generator=draw, dtype=torch.uint8)
    labels = torch.arange(count) % 10
    return fl.Examples(images, labels, columns={"user": np.arange(count) % 4})


@pytest.mark.parametrize(
    ("algorithm", "unit", "told"),
    [
        ("ditto", "client", False),
        ("per-fedavg", "client", False),
        ("fedavg", "client", True),
        ("local-only", "example", True),  # models by steps with noise
    ],
)
def test_what_models_without_noise_are_worth_is_in_no_record(algorithm, unit, told, tmp_path):
    described = experiment(
        {"unit": unit, "delta": 1e-3},
        rounds=1,
        algorithm=algorithm,
        clients={"partition": {"name": "natural", "column": "user"}},
    )
    dataset = fl.Dataset("users", users(40), users(40), tuple("abcdefghij"))
    result = fl.run(replace(described, dataset=dataset), tmp_path / "run")
    kept = [*result.records[-1], *result.summary["final"], *result.client_accuracy]
    assert any("client_accuracy" in str(name) for name in kept) == told
    assert (tmp_path / "run" / "clients.json").exists() is False
    keeps = "what clients keep for themselves between rounds (the checkpoint)"
    uncovered = result.summary["privacy"]["not_covered"]
    assert (keeps in uncovered) == (algorithm in ("ditto", "per-fedavg"))


def test_a_mechanism_with_options_is_named(tmp_path):
    fl.run(experiment({"mechanism": {"name": "banded", "bands": 2}}, rounds=2), tmp_path / "run")
    assert "(banded noise, cyclic sampling" in report([tmp_path / "run"]).read_text()


def test_a_run_resumed_counts_each_round_once(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    described = experiment({"ledger": str(ledger)}, rounds=3)
    fl.run(described, tmp_path / "run")
    result = fl.resume(tmp_path / "run", rounds=5)
    assert result.summary["privacy"]["epsilon"] == pytest.approx(spent(5), rel=1e-9)
    entries = Ledger(ledger).entries
    assert [one.round for one in entries] == [1, 2, 3, 4, 5]
    assert {one.run for one in entries} == {result_id(tmp_path / "run")}
    assert {one.release for one in entries} == {RELEASE}
    fl.run(described, tmp_path / "run", overwrite=True)
    assert len({one.run for one in Ledger(ledger).entries}) == 2


@pytest.mark.parametrize("unit", ["client", "example"])
def test_runs_that_a_ledger_adds_up_have_no_noise_in_common(unit, tmp_path):
    """The same noise in two runs would be gone in the difference of their models."""
    given = {"unit": unit, "noise": 100.0, "ledger": str(tmp_path / "ledger.jsonl")}
    models = []
    for name, lr in (("a", 0.01), ("b", 0.02)):
        described = experiment(given, rounds=1, local={"lr": lr, "steps": 1})
        start = build(described).network.params["fc.weight"]
        moved = fl.run(described, tmp_path / name).model["fc.weight"] - start
        models.append(moved.flatten() / (lr if unit == "example" else 1))
    assert abs(float(torch.corrcoef(torch.stack(models))[0, 1])) < 0.1


def test_a_ledgers_run_that_is_resumed_draws_as_it_began(tmp_path):
    given = {"ledger": str(tmp_path / "ledger.jsonl")}
    whole, part = experiment(given, rounds=3), experiment(given, rounds=1)
    first = fl.run(part, tmp_path / "run")
    copytree(tmp_path / "run", tmp_path / "copy")
    ends = [fl.resume(tmp_path / name, rounds=3).model["fc.weight"] for name in ("run", "copy")]
    assert torch.equal(*ends)
    other = fl.run(whole, tmp_path / "other")
    assert other.records[0]["clients"] != first.records[0]["clients"]


def result_id(folder) -> str:
    return str(json.loads((folder / "manifest.json").read_text())["run_id"])


def test_what_is_ordered_before_a_kill_is_not_ordered_again(tmp_path):
    """A round is in the ledger before it runs: if it is killed, the resumed run does it again."""
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(KeyboardInterrupt):
        fl.run(
            experiment({"ledger": str(ledger)}),
            tmp_path / "run",
            watch=lambda record: interrupt(record, 2),
        )
    before = len(Ledger(ledger).entries)
    assert before >= 2
    result = fl.resume(tmp_path / "run")
    assert result.status == "finished"
    assert [one.round for one in Ledger(ledger).entries] == [1, 2, 3, 4]


def interrupt(record: dict[str, Any], round: int) -> None:
    if record.get("round") == round:
        raise KeyboardInterrupt


def test_a_limit_ends_a_run_in_time_and_refuses_the_next_one(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    Ledger(ledger).set_limit(Limit(spent(2) + 1e-6, 1e-5))
    described = experiment({"ledger": str(ledger)})
    result = fl.run(described, tmp_path / "run")
    assert (result.status, len(result.records)) == ("finished", 2)
    assert "round 3 would pass the limit" in result.summary["reason"]
    assert "test_accuracy" in result.records[-1]
    assert (tmp_path / "run" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="limit"):
        fl.run(described, tmp_path / "next")
    assert not (tmp_path / "next").exists()
    assert len(Ledger(ledger).entries) == 2
    again = fl.resume(tmp_path / "run", rounds=5)
    assert (again.status, len(again.records)) == ("finished", 2)


def test_a_ledger_that_cannot_be_written_stops_the_round_before_it_runs(tmp_path):
    ledger = tmp_path / "ledger.jsonl"

    def take_away(record: dict[str, Any]) -> None:
        if record.get("round") == 2:
            ledger.unlink()
            ledger.mkdir()

    with pytest.raises(OSError, match="ledger"):
        fl.run(experiment({"ledger": str(ledger)}), tmp_path / "run", watch=take_away)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]


def test_an_edited_ledger_is_refused_before_anything_is_written(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    fl.run(experiment({"ledger": str(ledger)}, rounds=1), tmp_path / "run")
    ledger.write_text(ledger.read_text().replace('"noise": 1.0', '"noise": 9.0'))
    with pytest.raises(ValueError, match="was changed"):
        fl.run(experiment({"ledger": str(ledger)}), tmp_path / "next")
    assert not (tmp_path / "next").exists()


@pytest.mark.parametrize("rest", [0, 1])
def test_a_run_is_not_resumed_without_what_it_spent(rest, tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    fl.run(experiment({"ledger": str(ledger)}, rounds=2), tmp_path / "run")
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:rest]))
    with pytest.raises(ValueError, match="lacks round 2 of this run"):
        fl.resume(tmp_path / "run", rounds=3)
    assert len(Ledger(ledger).entries) == rest


def change(folder, old: str, new: str) -> None:
    file = folder / "experiment.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_a_run_is_not_resumed_with_other_keys_of_privacy(tmp_path):
    fl.run(experiment(rounds=1), tmp_path / "run")
    change(tmp_path / "run", "noise = 1.0", "noise = 0.5")
    with pytest.raises(ValueError, match=r"privacy\.noise"):
        fl.resume(tmp_path / "run", rounds=2)


@pytest.mark.parametrize("privacy", [{"noise": None, "epsilon": 8.0}, {"mechanism": "tree"}])
def test_noise_that_is_made_for_some_rounds_is_not_stretched_to_more(privacy, tmp_path):
    fl.run(experiment(privacy, rounds=2), tmp_path / "run")
    with pytest.raises(ValueError, match="noise for 2 rounds"):
        fl.resume(tmp_path / "run", rounds=3)


def test_a_ledger_keeps_no_epsilon_of_another_federation():
    with pytest.raises(ValueError, match="noise_cohort"):
        experiment({"ledger": "x", "noise_cohort": 1000})
