"""How much a client trains in a round: steps, parts of epochs, ranges, a cap."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.algorithm.pieces import Epochs, Steps
from fedlens.algorithm.slots import Draw
from fedlens.core import Plan, keys
from fedlens.core.federation import Holdings
from fedlens.runs.twin import twin
from fedlens.setup import build
from fedlens.setup.algorithm import make_algorithm
from tests.runs.resumable import assert_same_run
from tests.toys import toy

SIZES = [3, 8, 20, 0, 31]
HELD = Holdings.of(list(torch.arange(sum(SIZES)).split(SIZES)))
KEYS = keys.fold(torch.tensor(7), torch.arange(len(SIZES)))


def drawn(draw: Draw, client_keys: torch.Tensor = KEYS) -> Plan:
    plan = draw(HELD, client_keys)
    assert plan.index.numel() <= len(SIZES) * max(map(draw.plan_size, SIZES))
    return plan


def seen(plan: Plan, client: int) -> list[int]:
    """The examples that a client sees, in order."""
    rows = zip(plan.index[client].tolist(), plan.counts[client].tolist(), strict=True)
    return [example for batch, count in rows for example in batch[:count]]


def test_steps_go_round_the_clients_examples_epoch_by_epoch():
    plan, epochs = drawn(Steps(4, 7, 7, "steps")), drawn(Epochs(7, 4))
    assert plan.steps.tolist() == [7, 7, 7, 0, 7]
    for client, size in enumerate(SIZES):
        order = seen(plan, client)
        assert order == seen(epochs, client)[: len(order)], "the same passes, cut"
        whole = len(order) // max(size, 1) * size
        for first in range(0, whole, max(size, 1)):
            assert set(order[first : first + size]) == set(
                HELD.index[HELD.offsets[client] :][:size].tolist()
            )


def test_a_whole_number_of_epochs_is_that_of_epochs():
    plan, epochs = drawn(Steps(4, 3, 3, "epochs")), drawn(Epochs(3, 4))
    assert torch.equal(plan.index, epochs.index) and torch.equal(plan.counts, epochs.counts)


def test_a_part_of_an_epoch_is_its_first_batches_and_one_at_the_least():
    plan = drawn(Steps(4, 0.5, 0.5, "epochs"))
    assert plan.steps.tolist() == [1, 1, 3, 0, 4], "half of 1, 2, 5, 0 and 8 batches"
    assert drawn(Steps(1, 0.1, 0.1, "epochs")).steps.tolist() == [1, 1, 2, 0, 4]


def test_nobody_takes_more_steps_than_the_cap():
    assert drawn(Steps(4, 2, 2, "epochs", most=5)).steps.tolist() == [2, 4, 5, 0, 5]
    assert drawn(Steps(4, 9, 9, "steps", most=5)).steps.tolist() == [5, 5, 5, 0, 5]


def test_a_range_is_drawn_evenly_for_each_client_and_round():
    draw = Steps(4, 2, 5, "steps")
    counts = np.zeros(6)
    for round in range(500):
        own = keys.fold(KEYS, round)
        steps = drawn(draw, own).steps
        counts += np.bincount(steps[[0, 1, 2, 4]].numpy(), minlength=6)
    assert counts[:2].sum() == 0 and counts.sum() == 2000
    assert np.abs(counts[2:] - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75), "five sigmas"
    parts = [
        int(drawn(Steps(1, 0.5, 1.0, "epochs"), keys.fold(KEYS, r)).steps[4]) for r in range(50)
    ]
    assert min(parts) >= 16 and max(parts) <= 31 and len(set(parts)) > 5


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(), "model": "linear", "rounds": 3}
    plain |= {"engine": "sequential", "precision": "fp64", "clients": {"count": 4, "per_round": 2}}
    return fl.Experiment(**plain | changes)


AMOUNTS: list[dict[str, Any]] = [
    {"steps": 5},
    {"epochs": 0.5},
    {"epochs": {"low": 1, "high": 4}},
    {"steps": {"low": 1, "high": 6}, "max_steps": 4},
]


@pytest.mark.parametrize("amount", AMOUNTS, ids=str)
def test_engines_agree_on_how_much_is_done(amount):
    local = {"batch_size": 5, "lr": 0.05, **amount}
    expected = fl.run(described(local=local, algorithm="fednova"))
    for engine in ("stacked", "processes"):
        found = fl.run(described(local=local, algorithm="fednova", engine=engine))
        for one, other in zip(found.records, expected.records, strict=True):
            assert (one["batches"], one["examples"]) == (other["batches"], other["examples"])
        for name, value in expected.model.items():
            torch.testing.assert_close(found.model[name], value, rtol=1e-9, atol=1e-11)


def test_amounts_are_swept_side_by_side():
    points = fl.grid(described(engine="stacked", local={"batch_size": 5}), {"local.steps": [2, 5]})
    for name, found in fl.sweep(points).items():
        alone = fl.run(points[name])
        for key, value in alone.model.items():
            torch.testing.assert_close(found.model[key], value, rtol=1e-9, atol=1e-11)


def test_a_run_with_ranges_is_resumed_to_the_same_bytes(tmp_path):
    experiment = described(local={"steps": {"low": 1, "high": 6}, "batch_size": 5})
    fl.run(experiment, tmp_path / "whole")

    def kill(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fl.run(experiment, tmp_path / "cut", watch=kill)
    fl.resume(tmp_path / "cut", experiment=experiment)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_whole_epochs_stay_epochs():
    assert make_algorithm(described(local={"epochs": 2.0})).draw == Epochs(2, 32)
    assert make_algorithm(described(local={"epochs": 0.5})).draw == Steps(32, 0.5, 0.5, "epochs")


def test_the_twin_has_as_many_examples_and_whole_passes():
    central = twin(described(rounds=8, local={"epochs": 0.5, "batch_size": 3}))
    assert central.rounds == 2 and central.local.epochs == 1, "8 rounds of half the clients' halves"


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"epochs": 0}, "local.epochs is 0: choose a number above 0"),
        (
            {"epochs": "many"},
            "local.epochs is 'many': expected a number or { low = ..., high = ... }",
        ),
        ({"steps": [1, 3]}, "expected a whole number or { low = ..., high = ... }"),
        ({"epochs": {"low": 3, "high": 1}}, "let low be no more than high"),
        ({"epochs": {"lo": 3}}, "unknown key 'local.epochs.lo': did you mean 'low'?"),
        ({"epochs": {"low": 3}}, "local.epochs needs 'high': set local.epochs.high"),
        ({"steps": 0}, "local.steps is 0: choose 1 or more"),
        ({"steps": {"low": 1, "high": 2.5}}, "choose whole numbers of 1 or more"),
        ({"max_steps": 0}, "local.max_steps is 0: choose 1 or more"),
    ],
)
def test_an_amount_that_cannot_be_is_refused_in_a_line(local, message):
    with pytest.raises(ValueError, match=message) as caught:
        described(local=local)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("algorithm", ["admm", "liadmm", "qfedavg", "fedvc"])
def test_algorithms_that_need_whole_epochs_say_so(algorithm):
    with pytest.raises(ValueError, match="max_steps"):
        build(described(algorithm=algorithm, local={"steps": 4, "batch_size": 4}))


@pytest.mark.parametrize(
    ("algorithm", "epochs", "told"),
    [
        ({"name": "fedvc", "size": 16}, 5, True),
        ("liadmm", 5, True),
        ({"name": "fedvc", "size": 16}, 1, False),
        ("ceadmm", 5, False),
        ("fedavg", 5, False),
    ],
)
def test_epochs_that_an_algorithm_does_not_read_are_told_of(algorithm, epochs, told, caplog):
    local = fl.LocalTraining(epochs=epochs, batch_size=8)
    plain = fl.Experiment(toy(), "linear", 1, local=local, algorithm=algorithm, engine="sequential")
    with caplog.at_level(logging.WARNING, "fedlens"):
        fl.sweep({str(seed): replace(plain, seed=seed) for seed in range(2)}, progress=False)
    name = plain.algorithm[0].name
    line = f"local.epochs is 5, which has no effect: {name} has its own local work"
    assert [record.getMessage() for record in caplog.records] == [line] * told
