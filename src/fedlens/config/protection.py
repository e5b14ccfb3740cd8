"""The privacy of an experiment: its noise in numbers, and what it must not be combined with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fedlens.config.experiment import Experiment
from fedlens.config.names import CLIPS, MECHANISMS
from fedlens.config.options import Named
from fedlens.privacy.protection import Protection

ON_CLIENTS_DATA = "it is measured on the clients' own data, without noise"
WHO_IS_THERE = "who takes part is then more than a draw, and the data may decide it"
REFUSED: dict[str, tuple[Callable[[Experiment], Any], str]] = {
    "clients.devices": (lambda one: one.clients.devices, WHO_IS_THERE),
    "faults": (lambda one: one.faults, WHO_IS_THERE),
    "reporting": (lambda one: one.reporting and not protects_examples(one), WHO_IS_THERE),
    "clients.holdout": (lambda one: one.clients.holdout, ON_CLIENTS_DATA),
    '"train" in evaluate.on': (lambda one: "train" in one.evaluate.on, ON_CLIENTS_DATA),
    "evaluate.twin": (lambda one: one.evaluate.twin, ON_CLIENTS_DATA),
    "evaluate.local_only": (lambda one: one.evaluate.local_only, ON_CLIENTS_DATA),
    "evaluate.fine_tune": (lambda one: one.evaluate.fine_tune, ON_CLIENTS_DATA),
    "augment.mixup": (
        lambda one: one.augment.mixup and protects_examples(one),
        "what it mixes are examples, and none is then alone",
    ),
    "stop.batches": (
        lambda one: one.stop and one.stop.batches,
        "how many batches there are depends on what clients hold",
    ),
}
"""The keys that a private experiment must leave out, and why."""


def check_alone(experiment: Experiment) -> None:
    """Raise a ValueError for a key that a private experiment must leave out."""
    for key, (value, why) in REFUSED.items():
        if value(experiment):
            raise ValueError(f"{key} and [privacy] exclude each other ({why}): leave one out")


def protects_examples(experiment: Experiment) -> bool:
    return experiment.privacy is not None and experiment.privacy.unit == "example"


def protection_of(experiment: Experiment) -> Protection:
    """What an experiment with a number of clients does for privacy, its noise calibrated."""
    given, clients = experiment.privacy, experiment.clients
    assert given is not None and clients.count is not None
    check_alone(experiment)
    cohort, clip = clients.cohort, given.clip
    noise_cohort = given.noise_cohort or cohort
    mechanism = MECHANISMS.make(given.mechanism)
    usual: Literal["all", "cyclic", "poisson"] = "cyclic" if mechanism.correlated else "poisson"
    if experiment.aggregation is not None and experiment.aggregation.secure:
        usual = "all"  # a server that is not trusted draws nobody by chance
    found = Protection(
        noise=given.noise or 0.0,
        clip=CLIPS.make(clip) if isinstance(clip, Named) else clip,
        mechanism=mechanism,
        sampling=given.sampling or usual,
        rounds=experiment.rounds,
        clients=clients.count,
        cohort=cohort,
        noise_cohort=noise_cohort,
        population=given.population or round(clients.count * noise_cohort / cohort),
        seed=experiment.seed,
    )
    most = 1 / found.population
    # Settings that papers have for a federation of their own may have just that.
    if given.delta > most or (given.delta == most and given.noise_cohort is None):
        raise ValueError(
            f"privacy.delta is {given.delta:g}: choose less than 1 / clients = "
            f"{most:g}, for to publish one client at random has that"
        )
    return found if given.epsilon is None else found.calibrated(given.epsilon, given.delta)
