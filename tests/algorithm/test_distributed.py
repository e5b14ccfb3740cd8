"""Noise that clients add themselves, before a secure sum: enough of it, on the grid of the sum."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.algorithm import Algorithm
from fedlens.algorithm.distributed import (
    MOST_NUMBERS,
    NoiseOfClients,
    drawn_at_a_site,
    with_noise_of_clients,
)
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithm.secure import SecureSum
from fedlens.core import keys
from fedlens.privacy import accountant, discrete
from fedlens.privacy.events import Release
from fedlens.privacy.mechanisms import Gaussian
from fedlens.privacy.protection import Protection
from fedlens.storage.run_files import read_summary
from tests.runs.small_runs import toy

LAYOUT: Any = None  # nothing here depends on it


def protected(cohort=10, noise=1.0, clip=2.0, bits=32, without=None, rounds=5) -> Algorithm:
    base = Algorithm(select=Uniformly(cohort), draw=Epochs(1, batch_size=4), solve=Sgd(0.1))
    count = {"rounds": rounds, "clients": cohort, "cohort": cohort}
    count |= {"noise_cohort": cohort, "population": cohort}
    privacy = Protection(noise, clip, Gaussian(), "all", **count)
    return with_noise_of_clients(base, privacy, bits, 2 / 3, without, 1e-5)


def step_of(algorithm: Algorithm) -> NoiseOfClients:
    (step,) = algorithm.channel
    assert isinstance(step, NoiseOfClients)
    return step


def encoded(algorithm, update, seed=0):
    own = keys.fold(keys.root(seed), torch.arange(len(update["w"])))
    return step_of(algorithm).encode(update, {}, own, LAYOUT).update


def sums_of(algorithm: Algorithm) -> SecureSum:
    assert isinstance(algorithm.combine, SecureSum)
    return algorithm.combine


@pytest.mark.parametrize("cohort", [3, 10, 100])
@pytest.mark.parametrize("noise", [0.3, 1.0, 10.0])
def test_those_who_are_counted_on_add_the_whole_noise(cohort, noise):
    algorithm = protected(cohort, noise)
    step = step_of(algorithm)
    fewest = sums_of(algorithm).fewest
    assert step.honest <= fewest
    spread = step.deviation * step.step * math.sqrt(step.honest)
    assert spread == pytest.approx(noise * 2.0, rel=1e-12)
    assert step.deviation <= discrete.LARGEST


def test_the_noise_has_the_deviation_that_is_stated_and_differs_from_client_to_client():
    algorithm = protected()
    zeros = {"w": torch.zeros(10, 20_000), "b": torch.zeros(10, 5)}
    sent, step = encoded(algorithm, zeros), step_of(algorithm)
    drawn = sent["w"] / step.step
    assert float((drawn - drawn.round()).abs().max()) < 1e-6
    assert float(drawn.std()) == pytest.approx(step.deviation, rel=0.01)
    correlations = torch.corrcoef(drawn) - torch.eye(10)
    assert float(correlations.abs().max()) < 0.04
    assert not torch.equal(sent["w"], encoded(algorithm, zeros, seed=1)["w"])
    total = float(sent["w"].sum(0).std())
    assert total == pytest.approx(2.0 * math.sqrt(10 / step.honest), rel=0.02)


def test_what_is_sent_without_noise_is_the_update_within_the_clip():
    """So that one client moves the sum by no more than the clip, after rounding, too."""
    algorithm = protected(clip=0.5)
    step = step_of(algorithm)
    update = {"w": torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).double()}
    update["w"][1] *= 1e-5
    zeros = {"w": torch.zeros_like(update["w"])}
    plain = encoded(algorithm, update)["w"] - encoded(algorithm, zeros)["w"]
    norms = torch.linalg.vector_norm(plain, dim=1)
    assert float(norms.max()) <= 0.5
    assert float(norms[0]) > 0.49
    assert float((plain[1] - update["w"][1]).abs().max()) <= step.step / 2 * (1 + 1e-9)
    broken = {"w": torch.full((1, 4), torch.nan)}
    none = {"w": torch.zeros(1, 4)}
    assert torch.equal(encoded(algorithm, broken)["w"], encoded(algorithm, none)["w"])


@pytest.mark.parametrize("cohort", [3, 10, 100])
@pytest.mark.parametrize("bits", [16, 24, 32])
def test_no_sum_with_noise_can_wrap(cohort, bits):
    algorithm = protected(cohort, bits=bits)
    step, secure = step_of(algorithm), sums_of(algorithm)
    farthest = len(discrete.thresholds(step.deviation)) * step.step + step.clip
    assert farthest <= secure.clip
    values = {"w": torch.full((cohort, 1), farthest, dtype=torch.float64)}
    shares = torch.full((cohort,), 1 / cohort, dtype=torch.float64)
    assert int(secure.whole(values, shares)["w"]) < 2 ** (secure.bits - 1)


def test_the_sum_of_what_is_sent_is_exact():
    algorithm = protected()
    sent, step, secure = (
        encoded(algorithm, {"w": torch.rand(10, 50)}),
        step_of(algorithm),
        sums_of(algorithm),
    )
    shares = torch.full((10,), 1 / 10, dtype=torch.float64)
    whole = secure.whole(sent, shares)["w"]
    assert torch.equal(whole, (sent["w"] / step.step).round().long().sum(0))


def test_what_a_round_releases_costs_what_the_discrete_sums_cost():
    step = step_of(protected(rounds=20))
    norm = step.clip / step.step
    cost = discrete.epsilon(step.deviation, step.honest, norm, MOST_NUMBERS, 20, 1e-5)
    told = accountant.epsilon([step.release(0)] * 20, 1e-5)
    gaussian = accountant.epsilon([Release(1.0, count=20)], 1e-5)
    assert gaussian <= told <= cost * 1.001
    assert told == pytest.approx(cost, rel=1e-3)
    assert cost < 1.15 * gaussian


def test_more_who_may_lie_need_more_noise_of_each():
    some, more = step_of(protected(without=3)), step_of(protected(without=5))
    assert (some.honest, more.honest) == (7, 5)
    assert more.deviation * more.step > some.deviation * some.step
    assert accountant.epsilon([more.release(0)], 1e-5) == pytest.approx(
        accountant.epsilon([some.release(0)], 1e-5), rel=1e-3
    )
    for wrong in (2, 10):
        with pytest.raises(ValueError, match="without"):
            protected(without=wrong)


def test_a_grid_too_coarse_for_the_model_is_refused():
    step = step_of(protected(100, bits=16))
    with pytest.raises(ValueError, match="bits"):
        step.begin({"w": torch.zeros(1000, 1000)})


def test_noise_of_a_site_is_of_no_key():
    algorithm = drawn_at_a_site(protected())
    zeros = {"w": torch.zeros(2, 5000)}
    one, two = (encoded(algorithm, zeros)["w"] for _ in range(2))
    assert not torch.equal(one, two)
    found = float(np.std(one.numpy() / step_of(algorithm).step))
    assert found == pytest.approx(step_of(algorithm).deviation, rel=0.05)


def private(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(), "model": "linear", "rounds": 2}
    plain |= {"engine": "sequential", "clients": fl.Clients(count=4)}
    plain |= {"privacy": {"noise": 1.0, "delta": 1e-3}, "aggregation": {"secure": "simulated"}}
    return fl.Experiment(**plain | changes)


def test_a_simulation_has_the_noise_and_its_epsilon(tmp_path):
    fl.run(private(), tmp_path / "run")
    told = read_summary(tmp_path / "run")["privacy"]
    assert told["sampling"] == "all"
    gaussian = accountant.epsilon([Release(1.0, count=2)], 1e-3)
    assert gaussian < told["epsilon"] < 1.15 * gaussian


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"epsilon": 2.0}, "noise"),
        ({"noise": 1.0, "clip": {"name": "adaptive", "quantile": 0.5, "start": 0.1}}, "number"),
        ({"noise": 1.0, "mechanism": {"name": "tree"}}, "gaussian"),
        ({"noise": 1.0, "sampling": "fixed"}, "all"),
        ({"noise": 1.0, "noise_cohort": 100}, "take part"),
        ({"noise": 0.0}, "above 0"),
        ({"noise": 1.0, "without": 0}, "without"),
    ],
)
def test_what_needs_a_trusted_server_is_refused(given, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        fl.run(private(privacy={"delta": 1e-3, **given}), tmp_path / "run")
