"""The privacy of examples in a run: who holds and draws how many, and the noise for an ε."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import PoissonBatches
from fedlens.config.experiment import Experiment
from fedlens.core.federation import Federation, Fixed
from fedlens.privacy.examples import ExampleProtection
from fedlens.rounds.cohorts import Call


def protection_of_examples(
    experiment: Experiment,
    algorithm: Algorithm,
    federation: Federation,
    times: int = 1,
    everyone: bool = False,
) -> ExampleProtection:
    """What the clients do, who take part as the algorithm selects them by the seed.

    The selection reads nothing of their data but how many examples they hold; with `times` as many
    they take part as often. With `everyone`, and wherever some may stand in for others, all are
    counted in all rounds.
    """
    given, draw = experiment.privacy, algorithm.draw
    assert given is not None and isinstance(draw, PoissonBatches)
    if not isinstance(federation.split, Fixed):
        raise ValueError(
            f"clients.partition {experiment.clients.partition.name!r} deals other examples in each "
            "round, or the same to several clients, and privacy counts what is seen of each: "
            "choose another one"
        )
    sizes = (times * federation.sizes(0)).tolist()
    everyone = everyone or experiment.reporting is not None
    most = 1 / max(max(sizes), 1)
    if given.delta >= most and times == 1:
        raise ValueError(
            f"privacy.delta is {given.delta:g}: choose less than 1 / examples of a client = "
            f"{most:g}, for to publish one example at random has that"
        )
    calls = (
        Call(algorithm, federation, experiment.seed, round) for round in range(experiment.rounds)
    )
    return ExampleProtection(
        noise=given.noise or 0.0,
        rates=np.array([draw.rate(size) for size in sizes]),
        steps=np.array([draw.num_steps(size) for size in sizes]),
        chosen=[np.arange(len(sizes)) if everyone else call.select().numpy() for call in calls],
        count_noise=given.count_noise or 0.0,
    )


def with_noise_of_examples(
    experiment: Experiment, algorithm: Algorithm, federation: Federation
) -> Experiment:
    """The experiment with noise in place of an ε, and checked in any case."""
    given = experiment.privacy
    assert given is not None
    found = protection_of_examples(experiment, algorithm, federation)
    if given.epsilon is None:
        return experiment
    found = found.calibrated(given.epsilon, given.delta)
    return replace(experiment, privacy=replace(given, epsilon=None, noise=found.noise))
