"""The algorithm of an experiment."""

from __future__ import annotations

from fedlens.algorithm import Algorithm, Amendment, compose
from fedlens.experiment import LOSSES, Experiment
from fedlens.names import ALGORITHMS
from fedlens.options import call, expect, find
from fedlens.pieces import Epochs, Objective, Sgd, Uniformly


def make_algorithm(experiment: Experiment) -> Algorithm:
    local = experiment.local
    base = Algorithm(
        select=Uniformly(experiment.clients.cohort),
        draw=Epochs(local.epochs, local.batch_size),
        objective=Objective(find(LOSSES, experiment.loss, "loss")),
        solve=Sgd(local.lr, local.momentum, local.weight_decay),
        advance=Sgd(experiment.server.lr),
        reset=local.reset,
        personal_norm=experiment.norm == "local",
    )
    papers = []
    for named in experiment.algorithm:
        made = call(find(ALGORITHMS, named.name, "algorithm"), options=named.options)
        papers.append(expect(made, Amendment, f"algorithm {named.name!r}"))
    return compose(base, *papers)
