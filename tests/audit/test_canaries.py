"""Canaries find a mechanism that is not what it claims, and clear one that is."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.algorithm.private import ClipAndNoise
from fedlens.algorithm.slots import Encoded
from fedlens.audit.membership import Measured, measure
from fedlens.config.sections import Aggregation
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.events import Release
from fedlens.privacy.factorisation import banded
from fedlens.privacy.one_run import best_bound
from fedlens.setup import Setup, build


def setup_of(rounds: int = 1, **privacy: Any) -> Setup:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (600, 1, 12, 12), generator=draw, dtype=torch.uint8)
    labels = torch.randint(0, 10, (600,), generator=draw)
    some = fl.Examples(images, labels)
    experiment = fl.Experiment.of(
        {
            "dataset": "fashion-mnist-mini",
            "model": "linear",
            "rounds": rounds,
            "engine": "sequential",
            "clients": {"count": 600},
            "evaluate": {"on": []},
            "privacy": {"epsilon": 2.0, "delta": 1e-5, "sampling": "all"} | privacy,
        }
    )
    classes = tuple("abcdefghij")
    return build(replace(experiment, dataset=fl.Dataset("noise", some, some, classes)))


def broken(setup: Setup, change: Any) -> Setup:
    """The same, whose step of privacy is another one than it claims."""
    algorithm = setup.program.algorithm
    *others, step = algorithm.channel
    assert isinstance(step, ClipAndNoise)
    made = change(step)
    algorithm = replace(algorithm, channel=(*others, made))
    return replace(setup, program=replace(setup.program, algorithm=algorithm))


class LessNoise(ClipAndNoise):
    """A tenth of the noise that it claims."""

    def decode(self, combined, key, cohort, memory, round):
        less = ClipAndNoise(replace(self.privacy, noise=self.privacy.noise / 10), self.share)
        return less.decode(combined, key, cohort, memory, round)


class NoClip(ClipAndNoise):
    """It forgets to clip."""

    def encode(self, update, memory, client_keys, layout):
        return Encoded(dict(update))


@pytest.mark.parametrize("sampling", ["all", "poisson", "fixed"])
def test_a_mechanism_as_it_claims_is_not_refuted(sampling):
    found = measure(setup_of(sampling=sampling))
    assert found.claimed == pytest.approx(2.0, abs=0.01)
    assert found.canaries == 300
    assert found.at_least < 1.5
    assert found.holds


def test_the_bound_is_not_empty_where_there_is_hardly_any_noise():
    assert 1.5 < measure(setup_of(epsilon=50.0)).at_least < 50


@pytest.mark.parametrize("step", [LessNoise, NoClip])
def test_a_broken_mechanism_is_found(step):
    found = measure(broken(setup_of(), lambda own: step(own.privacy, own.share)))
    assert found.at_least > found.claimed
    assert not found.holds
    assert found.right > 0.9 * found.guesses


def test_what_cannot_be_measured_is_refused():
    plain = setup_of()
    without = replace(plain, experiment=replace(plain.experiment, privacy=None))
    with pytest.raises(ValueError, match="claims no privacy"):
        measure(without)
    secure = replace(
        setup_of(epsilon=None, noise=1.0).experiment, aggregation=Aggregation(secure="simulated")
    )
    with pytest.raises(ValueError, match="secure"):
        measure(build(secure))
    with pytest.raises(ValueError, match="noise_cohort"):
        measure(setup_of(noise_cohort=60000, sampling="poisson"))


def test_a_claim_holds_up_to_itself():
    assert Measured(2.0, 2.0, 10, 10, 9).holds
    assert not Measured(2.0, 2.1, 10, 10, 9).holds


def examples_of(**privacy: Any) -> Setup:
    described = setup_of(unit="example", sampling=None, epsilon=None, delta=1e-4, noise=0.5)
    assert described.experiment.privacy is not None
    experiment = replace(
        described.experiment,
        clients=fl.Clients(count=2),
        rounds=2,
        local=fl.LocalTraining(batch_size=50, epochs=2, lr=0.1),
        model=fl.Named("mcmahan-cnn"),
        privacy=replace(described.experiment.privacy, **privacy),
    )
    return build(experiment)


def test_examples_that_are_protected_as_claimed_do_not_refute_it():
    setup = examples_of()
    found = measure(setup)
    assert found.unit == "example" and found.canaries == 500
    assert found.claimed == setup.examples.epsilon(2, 1e-4)
    assert 0 < found.at_least < found.claimed and found.holds


def test_steps_with_a_tenth_of_the_noise_are_found():
    setup = examples_of(noise=2.0)
    algorithm = setup.program.algorithm
    assert algorithm.objective.private is not None
    less = replace(algorithm.objective.private, noise=0.2)
    algorithm = replace(algorithm, objective=replace(algorithm.objective, private=less))
    found = measure(replace(setup, program=replace(setup.program, algorithm=algorithm)))
    assert found.claimed < 2 < found.at_least
    assert not found.holds


def test_steps_that_forget_to_clip_are_found(monkeypatch):
    broken = "fedlens.network.private.clip_factors"
    monkeypatch.setattr(broken, lambda squared, _clip: torch.ones_like(squared))
    found = measure(examples_of(noise=2.0))
    assert found.claimed < 2 < found.at_least
    assert not found.holds


def test_batches_that_have_everybody_are_found_if_a_sixth_is_claimed():
    setup = examples_of(noise=2.0)
    claimed = setup.examples.epsilon(2, 1e-4)
    setup.examples.rates[:] = 1.0
    assert not replace(measure(setup), claimed=claimed).holds


def test_the_factor_of_pfl_is_found():
    """C from cholesky(X) with rows of norm 1: who takes part early is hidden by less noise.

    Of clients in the first round, each with a coordinate of its own, C times the sums and the noise
    are seen; the claim is that of a column of norm 1.
    """
    right = banded(300, 48).matrix
    gram = right.T @ right
    wrong = np.linalg.cholesky(gram)  # gram = C'C is meant, and this is C C'
    draw, noise, canaries = np.random.default_rng(0), 4.0, 1000
    member = draw.random(canaries) < 0.5
    bounds = []
    for matrix in (right, wrong):
        column = matrix[:, 0]
        seen = np.outer(member, column) + noise * draw.standard_normal((canaries, 300))
        bounds.append(best_bound(seen @ column, member, 1e-5)[0])
    claimed = epsilon([Release(noise)], 1e-5)
    assert np.linalg.norm(wrong[:, 0]) == pytest.approx(3.81, abs=0.05)
    assert bounds[0] < claimed < bounds[1]
