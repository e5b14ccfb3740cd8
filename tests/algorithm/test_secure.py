"""Secure sums: whole numbers, whose sum has the same bits in any order and cannot wrap."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedlens as fl
from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithm.secure import SecureSum, enough, with_secure_sums
from fedlens.algorithms.quantize import quantize
from fedlens.algorithms.scaffold import scaffold
from fedlens.algorithms.sign import sign
from fedlens.algorithms.top_k import top_k
from fedlens.storage.run_files import RunFailed, read_records
from tests.federations import ENGINES, assert_equal, train
from tests.papers_under_test import ALGORITHMS
from tests.runs.small_runs import normed, toy
from tests.runs.sweeps import assert_alone

BASE = Algorithm(select=Uniformly(5), draw=Epochs(2, batch_size=4), solve=Sgd(0.1))


def secured(algorithm: Algorithm, clip: float = 16.0, bits: int = 52) -> Algorithm:
    return with_secure_sums(algorithm, clip, bits, algorithm.select.cohort_size, 2 / 3)


def is_possible(name: str) -> bool:
    try:
        secured(ALGORITHMS[name])
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", [*filter(is_possible, ALGORITHMS)])
def test_a_secure_sum_is_the_plain_sum_but_for_rounding(name):
    plain, secure = train(ALGORITHMS[name]), train(secured(ALGORITHMS[name], clip=1e3))
    for key, p in plain.params.items():
        torch.testing.assert_close(secure.params[key], p, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_what_rounding_changes_is_bounded(bits):
    plain, algorithm = train(BASE, rounds=1), secured(BASE, bits=bits)
    assert isinstance(algorithm.combine, SecureSum)
    found = train(algorithm, rounds=1)
    bound = algorithm.combine.cohort / 2 * algorithm.combine.step
    apart = max(float((found.params[n] - p).abs().max()) for n, p in plain.params.items())
    assert 0 < apart <= bound * (1 + 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_sum_has_the_same_bits_however_it_is_divided(engine):
    """In bits so few that what engines round differently is gone."""
    algorithm = secured(compose(BASE, scaffold()), bits=24)
    assert_equal(
        train(algorithm, engine, rounds=1).params, train(algorithm, "sequential", rounds=1).params
    )


@given(
    numbers=st.lists(st.floats(-1, 1), min_size=3, max_size=40),
    clip=st.floats(1e-3, 1e3),
    bits=st.integers(16, 52),
    sign=st.sampled_from([None, -1.0, 1.0]),
)
def test_no_sum_can_wrap(numbers, clip, bits, sign):
    values = torch.tensor(numbers, dtype=torch.float64) * clip
    if sign is not None:
        values = torch.full_like(values, sign * clip)
    secure = SecureSum(clip, bits, len(numbers), 2 / 3, 1.0)
    shares = torch.full_like(values, 1 / len(numbers))
    whole = secure.whole({"w": values}, shares)
    assert abs(int(whole["w"])) < 2 ** (bits - 1)
    opened = secure.opened(whole, 1.0)["w"]
    assert abs(float(opened - (values * shares).sum())) <= len(numbers) / 2 * secure.step * 1.01


@pytest.mark.parametrize("value", [16.5, float("nan"), float("-inf")])
def test_a_number_that_is_too_large_is_refused_with_the_number(value):
    secure = SecureSum(16.0, 32, 3, 2 / 3, 1.0)
    sent = {"w": torch.tensor([[1.0, 2.0], [value, 3.0]])}
    first, second = secure.peak([sent, {"loss": torch.tensor([15.0, 0.0])}]).tolist()
    assert first == 15.0
    assert secure.refused(first) is None
    assert f"{abs(value):.4g}" in str(secure.refused(second))


def tiny(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(), "model": "linear", "rounds": 2}
    plain |= {"engine": "stacked", "clients": fl.Clients(count=4)}
    return fl.Experiment(**plain | {"aggregation": {"secure": "simulated"}} | changes)


def test_a_run_stops_at_a_number_that_is_too_large(tmp_path):
    with pytest.raises(RunFailed, match=r"aggregation\.clip"):
        fl.run(tiny(aggregation={"secure": "simulated", "clip": 1e-4}), tmp_path / "run")


def test_a_run_records_means_and_counts_the_bits(tmp_path):
    for name, more in (("plain", {}), ("secure", {"secure": "simulated", "bits": 24})):
        fl.run(tiny(aggregation=more), tmp_path / name)
    plain, secure = (read_records(tmp_path / name)[-1] for name in ("plain", "secure"))
    assert secure["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-4)
    assert secure["bytes_up"] == plain["bytes_up"] * 24 / 32


def test_a_sweep_has_the_runs_that_its_points_have_alone(tmp_path):
    points = {
        "quick": tiny(),
        "slow": tiny(local={"lr": 0.01}),
        "coarse": tiny(aggregation={"secure": "simulated", "bits": 16}),
        "plain": tiny(aggregation=None),
    }
    fl.sweep(points, tmp_path / "sweep")
    assert_alone(points, tmp_path / "sweep", exact=False)


def test_what_is_too_long_for_the_server_is_left_out_as_in_any_sum(tmp_path):
    faulty = {"faults": {"nan": 0.3}, "reporting": {"quorum": 0.75}, "rounds": 4}
    secure, plain = (
        fl.run(tiny(**faulty, aggregation=sums), tmp_path / name)
        for name, sums in (("secure", {"secure": "simulated", "bits": 48}), ("plain", None))
    )
    for one, other in zip(secure.records, plain.records, strict=True):
        assert one["clients"] == other["clients"]
        assert one["train_loss"] == pytest.approx(other["train_loss"])
    assert any(len(one["clients"]) < 4 for one in plain.records)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        *(({"algorithm": [name]}, "one by one") for name in ("median", "fedbuff", "fedns")),
        *(({"algorithm": [name]}, "masks") for name in ("quantize", "top-k", "sign")),
        ({"algorithm": ["fednova"]}, "by itself"),
        ({"clients": fl.Clients(count=2)}, "3"),
        ({"model": normed()}, "norm"),
        ({"privacy": {"epsilon": 1.0}}, "privacy"),
        ({"reporting": {"over_select": 1.5}}, "over_select"),
        ({"aggregation": {"secure": True}}, "simulated"),
        ({"aggregation": {"secure": "simulated", "threshold": 0.5}}, "two thirds"),
    ],
)
def test_what_needs_single_updates_is_refused_with_the_reason(change, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        fl.run(tiny(**change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_sparse_and_rounded_updates_are_refused_in_python_too():
    for paper in (quantize(), top_k(), sign()):
        with pytest.raises(ValueError, match="masks"):
            secured(compose(BASE, paper))


@pytest.mark.parametrize(("asked", "least"), [(3, 2), (4, 3), (6, 4), (10, 7), (100, 67)])
def test_two_thirds_must_stay(asked, least):
    assert enough(2 / 3, asked) == enough(0.667, asked) == least
    assert enough(1.0, asked) == asked
