"""How long an experiment will take here: a little of it, timed, and the rest counted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedlens import keys
from fedlens.build import Setup, build
from fedlens.core import Examples, Federation, Fixed, Holdings, Split
from fedlens.experiment import Experiment
from fedlens.runs.active import train

BATCHES = (1, 4)  # of each client, in the two rounds that are timed
TESTED = 1000  # examples, in an evaluation that is timed


@dataclass(frozen=True)
class Shortened(Split):
    """A split of which every client holds the first few examples."""

    whole: Split
    most: int

    @property
    def num_clients(self) -> int:
        return self.whole.num_clients

    def holdings(self, round: int, cohort: Tensor) -> Holdings:
        held = self.whole.holdings(round, cohort)
        return Holdings.of([held.members(k)[: self.most] for k in range(len(held))])


class Cost(NamedTuple):
    """Seconds of a round, whatever is trained in it; of an example in it; of a tested example."""

    a_round: float
    an_example: float
    a_test: float


class Timing:
    """Estimates of several experiments; those whose steps cost the same are timed once."""

    def __init__(self, data: Path | None = None) -> None:
        self.data = data
        self.known: dict[str, Cost] = {}
        self.found: dict[str, float] = {}

    def seconds(self, experiment: Experiment) -> float:
        """What a run of the experiment will take, its evaluations included."""
        same = replace(experiment, seed=0).toml()
        if same not in self.found:
            self.found[same] = self._seconds(experiment)
        return self.found[same]

    def _seconds(self, experiment: Experiment) -> float:
        # A file of weights may be another run's, yet to come; the time does not depend on it.
        setup = build(replace(experiment, weights=None, weights_sha256=None), self.data)
        try:
            kind = _kind(experiment)
            if kind not in self.known:
                self.known[kind] = _timed(setup)
            cost = self.known[kind]
            tested = sum(map(len, setup.parts.values()))
            evaluations = -(-experiment.rounds // experiment.evaluate.every)
            a_round = cost.a_round + _examples_a_round(setup) * cost.an_example
            return experiment.rounds * a_round + evaluations * tested * cost.a_test
        finally:
            setup.engine.close()


def _kind(experiment: Experiment) -> str:
    """What the cost of a step depends on."""
    plain = experiment.plain()
    keep = ("dataset", "model", "outputs", "norm", "train_last", "precision", "engine", "device")
    algorithms = [named.name for named in experiment.algorithm]
    at_once = (experiment.clients.cohort, experiment.local.batch_size)
    return json.dumps([{key: plain.get(key) for key in keep}, algorithms, at_once])


def _timed(setup: Setup) -> Cost:
    """A short round and a longer one tell what a round costs, and what an example does."""
    (short, quick, a_test), (long, slow, _) = (_round(setup, batches) for batches in BATCHES)
    if long <= short:  # clients that hold too little to make a difference
        return Cost(0.0, quick / max(short, 1), a_test)
    an_example = max(slow - quick, 0.0) / (long - short)
    return Cost(max(quick - short * an_example, 0.0), an_example, a_test)


def _round(setup: Setup, batches: int) -> tuple[int, float, float]:
    """The examples and the seconds of a round of so many batches; the seconds of a test."""
    experiment = setup.experiment
    parts = {name: _first(part, TESTED) for name, part in setup.parts.items()}
    short = replace(
        setup,
        # The first round also starts processes and compiles; the second is timed.
        experiment=replace(experiment, rounds=2, evaluate=replace(experiment.evaluate, every=1)),
        federation=_shortened(setup.federation, batches * experiment.local.batch_size),
        parts=parts,
        held_out=None,
    )
    result = train(short)
    last = result.records[-1]
    tests = 2 * max(sum(map(len, parts.values())), 1)
    return last["examples"], last["seconds"], result.summary["seconds"]["evaluation"] / tests


def _first(examples: Examples, count: int) -> Examples:
    return replace(
        examples,
        images=examples.images[:count],
        labels=examples.labels[:count],
        columns={name: column[:count] for name, column in examples.columns.items()},
    )


def _shortened(federation: Federation, most: int) -> Federation:
    split: Split = Shortened(federation.split, most)
    if isinstance(federation.split, Fixed):
        split = Fixed(split.holdings(0, torch.arange(federation.num_clients)))
    return replace(federation, split=split)


def _examples_a_round(setup: Setup) -> float:
    """How many examples the cohort processes in a round, on average."""
    federation, cohort = setup.federation, setup.experiment.clients.cohort
    clients = torch.arange(federation.num_clients)[: max(64, cohort)]
    holdings = federation.holdings(0, clients)
    root = keys.fold(keys.root(setup.experiment.seed), keys.purpose("estimate"))
    drawn = setup.program.algorithm.draw(holdings, keys.fold(root, clients)).counts
    return cohort * float(drawn.sum()) / max(len(clients), 1)
