"""The work of a round before it runs, counted from a drawn plan."""

from __future__ import annotations

from fedlens.config.sections import Evaluate
from fedlens.core import Plan, keys
from fedlens.setup import Setup

A_STEP = 3  # a training step takes about as long as this many forward passes


def drawn_plan(setup: Setup, round: int) -> Plan:
    """A plan that a round could have. The run uses other random keys, so draws another plan."""
    federation, algorithm = setup.federation, setup.program.algorithm
    key = keys.root(setup.experiment.seed, keys.purpose("estimate"), round)
    clients = algorithm.select(federation, round, key)
    return algorithm.draw(federation.holdings(round, clients), keys.fold(key, clients))


def images_a_round(setup: Setup) -> float:
    """Images that a round passes through the model, in forward passes, evaluations included.

    The time of a round of one model is about proportional to this number.
    """
    experiment, plan = setup.experiment, drawn_plan(setup, 0)
    trained = float(plan.counts.sum())
    if (pace := setup.program.algorithm.pace) is not None:  # a round takes only some of the updates
        trained *= pace.buffer / len(plan.counts)
    evaluations = num_evaluations(experiment.evaluate, experiment.rounds)
    tested = sum(map(len, setup.parts.values()))
    return A_STEP * trained + tested * evaluations / experiment.rounds


def num_evaluations(evaluate: Evaluate, rounds: int) -> int:
    """The number of evaluations of a run of this many rounds (`Evaluate.is_due`)."""
    others = {at for at in (*evaluate.at, rounds) if 0 < at <= rounds and at % evaluate.every}
    return rounds // evaluate.every + len(others)
