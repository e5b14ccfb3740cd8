"""How much work a round is, before it is run: by counting what is drawn in one."""

from __future__ import annotations

from fedlens import keys
from fedlens.core import Plan
from fedlens.sections import Evaluate
from fedlens.setup import Setup

A_STEP = 3  # forward passes that a step of training takes, about


def drawn_plan(setup: Setup, round: int) -> Plan:
    """What the clients of a round could be planned to do: those of the run draw otherwise."""
    federation, algorithm = setup.federation, setup.program.algorithm
    key = keys.root(setup.experiment.seed, keys.purpose("estimate"), round)
    clients = algorithm.select(federation, round, key)
    return algorithm.draw(federation.holdings(round, clients), keys.fold(key, clients))


def images_a_round(setup: Setup) -> float:
    """How many images a round of a run takes through the model, its share of evaluations included.

    Rounds of one model take about as long as they have images.
    """
    experiment, plan = setup.experiment, drawn_plan(setup, 0)
    trained = float(plan.counts.sum())
    if (pace := setup.program.algorithm.pace) is not None:  # it takes some of those who train
        trained *= pace.buffer / len(plan.counts)
    evaluations = num_evaluations(experiment.evaluate, experiment.rounds)
    tested = sum(map(len, setup.parts.values()))
    return A_STEP * trained + tested * evaluations / experiment.rounds


def num_evaluations(evaluate: Evaluate, rounds: int) -> int:
    """How often a run of this many rounds is evaluated (`Evaluate.is_due`)."""
    others = {at for at in (*evaluate.at, rounds) if 0 < at <= rounds and at % evaluate.every}
    return rounds // evaluate.every + len(others)
