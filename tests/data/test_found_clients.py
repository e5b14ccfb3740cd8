"""Clients found in the data, and clients of uneven size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlens as fl
from fedlens.core.federation import Examples, Pool
from fedlens.data.emd import emd
from fedlens.data.partitions.dealing import apply_partition
from fedlens.data.statistics import counts
from fedlens.setup import build


def examples(labels: Any, **columns: Any) -> Examples:
    labels = torch.as_tensor(labels, dtype=torch.int64)
    blank = torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8)
    return Examples(blank, labels, {name: np.asarray(c) for name, c in columns.items()})


def dataset(train: Examples) -> fl.Dataset:
    return fl.Dataset("blank", train, train, tuple("abcdefghij"))


def split(name: str, given: Examples, num_clients: int = 0, seed: int = 0, **kw: Any):
    return apply_partition(name, kw, Pool(given, 10, num_clients, np.random.default_rng(seed)))


WRITERS = ["zoe", "ann", "ben", "ann", "zoe", "ann"]


def described(train: Examples, **clients: Any) -> fl.Experiment:
    model, described = fl.Named("linear"), fl.Clients(**clients)
    return fl.Experiment(dataset(train), model, rounds=2, clients=described)


def test_a_column_names_the_clients() -> None:
    train = examples([0, 1, 2, 3, 4, 5], writer=WRITERS)
    held = split("natural", train, column="writer")
    assert held.names == ("ann", "ben", "zoe")
    assert [held.members(client).tolist() for client in range(3)] == [[1, 3, 5], [2], [0, 4]]
    taken = held.take(torch.tensor([2, 0]))
    assert taken.names == ("zoe", "ann")
    assert counts(held, train.labels, 10)["client_names"] == ["ann", "ben", "zoe"]
    assert "client_names" not in counts(split("iid", train, 2), train.labels, 10)


def test_numbers_name_clients_too() -> None:
    held = split("natural", examples([0, 0, 0], user=[10, 9, 10]), column="user")
    assert held.names == ("9", "10")


def test_the_data_say_how_many_clients_there_are() -> None:
    train = examples(np.arange(60) % 10, writer=np.arange(60) % 20)
    natural = {"name": "natural", "column": "writer"}
    setup = build(described(train, partition=natural, per_round=0.25))
    assert setup.federation.num_clients == setup.experiment.clients.count == 20
    assert setup.experiment.clients.cohort == 5
    assert build(described(train, partition=natural, per_round=20)).federation.num_clients == 20
    assert build(described(train, partition=natural, count=20)).federation.num_clients == 20
    with pytest.raises(ValueError, match="per_round is 21"):
        build(described(train, partition=natural, per_round=21))
    with pytest.raises(ValueError, match=r"clients\.count"):
        build(described(train, partition=natural, count=19))
    assert described(train).clients.count == 10


def test_a_run_over_writers_keeps_their_names_and_is_described_whole(tmp_path) -> None:
    train = examples(np.arange(60) % 10, writer=np.arange(60) % 3)
    natural = {"name": "natural", "column": "writer"}
    setup = build(described(train, partition=natural, holdout=0.5))
    assert setup.client_tests is not None
    tested = setup.client_tests.holdings
    assert setup.federation.everyone(0).names == tested.names == ("0", "1", "2")
    plain = described(train, partition=natural).plain()
    assert plain["clients"]["partition"] == natural
    assert "count" not in plain["clients"]
    assert fl.run(described(train, partition=natural), tmp_path / "run").status == "finished"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "the data have no column 'writer': choose another partition"),
        ({"riter": [1, 2]}, "no column 'writer': did you mean 'riter'?"),
        ({"writer": [[1, 2], [3, 4]]}, "the column 'writer' is [2, 2]: it must have one value"),
    ],
)
def test_a_column_that_is_not_there_is_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        split("natural", examples([0, 1], **columns), column="writer")
    assert message in str(refused.value)


@settings(max_examples=30, deadline=None)
@given(
    num_clients=st.integers(1, 200),
    number=st.sampled_from([0.0, 1e-320, 1e-3, 0.5, 1.0, 30.0, 1e38]),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize(
    ("name", "option"), [("quantity-dirichlet", "alpha"), ("power-law", "exponent")]
)
def test_uneven_clients_hold_every_example_once(
    name: str, option: str, num_clients: int, number: float, seed: int
) -> None:
    train = examples(np.arange(200) % 10)
    held = split(name, train, num_clients, seed, **{option: number})
    assert len(held) == num_clients
    assert int(held.sizes.min()) >= 1
    assert held.index.sort().values.tolist() == list(range(200))


def test_small_alphas_make_sizes_uneven_and_classes_stay_alike() -> None:
    train = examples(np.random.default_rng(0).permutation(np.arange(20_000) % 10))
    spread = []
    for alpha in (0.0, 0.1, 1.0, 10.0, math.inf):
        held = split("quantity-dirichlet", train, 20, alpha=alpha)
        sizes = held.sizes.double()
        spread.append(float(sizes.std() / sizes.mean()))
        assert emd(held.label_counts(train.labels, 10)) < 0.15
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] == 0
    assert spread[0] > 4
    # The coefficient of variation of one of 20 Dirichlet shares is sqrt(19 / (20 alpha + 1)).
    drawn = [split("quantity-dirichlet", train, 20, seed, alpha=1.0).sizes for seed in range(40)]
    assert float(torch.stack(drawn).double().std() / 1000) == pytest.approx(0.951, abs=0.08)


def test_a_power_law_falls_as_its_exponent_says() -> None:
    train = examples(np.zeros(31_000))
    sizes = split("power-law", train, 5, exponent=1.0).sizes.tolist()
    harmonic = [1 / k for k in range(1, 6)]
    assert sizes == pytest.approx([31_000 * h / sum(harmonic) for h in harmonic], abs=2)
    assert split("power-law", train, 5, exponent=0.0).sizes.tolist() == [6200] * 5
    with pytest.raises(ValueError, match="exponent"):
        split("power-law", train, 5, exponent=-1.0)
