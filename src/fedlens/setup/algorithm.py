"""The algorithm of an experiment."""

from __future__ import annotations

import torch

from fedlens.algorithm import Algorithm, Amendment, compose
from fedlens.experiment import Experiment, LocalTraining
from fedlens.names import ALGORITHMS, LOSSES, OPTIMIZERS
from fedlens.options import call, expect, find
from fedlens.pieces import (
    ByEffectiveNumber,
    ClippedByNorm,
    ClippedByValue,
    Epochs,
    Objective,
    Sgd,
    Uniformly,
)
from fedlens.pieces.losses import with_options
from fedlens.slots import Solve


def make_algorithm(experiment: Experiment) -> Algorithm:
    local = experiment.local
    base = Algorithm(
        select=Uniformly(experiment.clients.cohort),
        draw=Epochs(local.epochs, local.batch_size),
        objective=_objective(experiment),
        solve=_solver(local),
        advance=Sgd(experiment.server.lr),
        reset=local.reset,
        personal_norm=experiment.norm == "local",
    )
    papers = []
    for named in experiment.algorithm:
        made = call(find(ALGORITHMS, named.name, "algorithm"), options=named.options)
        papers.append(expect(made, Amendment, f"algorithm {named.name!r}"))
    return compose(base, *papers)


def _objective(experiment: Experiment) -> Objective:
    named = experiment.loss
    loss = with_options(find(LOSSES, named.name, "loss"), named.options)
    if named.name in LOSSES:  # it refuses options that make no sense
        loss(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64))
    objective, beta = Objective(loss), experiment.local.class_balance
    return objective.times(ByEffectiveNumber(beta)) if beta else objective


def _solver(local: LocalTraining) -> Solve:
    """The optimiser that is named, on gradients that are clipped number by number, then by norm."""
    named = local.optimizer
    made = call(find(OPTIMIZERS, named.name, "optimizer"), local, options=named.options)
    solve = expect(made, Solve, f"optimizer {named.name!r}")  # type: ignore[type-abstract]
    if local.clip is not None:
        solve = ClippedByNorm(solve, local.clip)
    if local.clip_value is not None:
        solve = ClippedByValue(solve, local.clip_value)
    return solve
