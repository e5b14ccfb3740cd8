"""Membership inference by the likelihood ratio attack (LiRA; Carlini et al., S&P 2022).

G shadow runs are trained, side by side on a GPU, each on about half of every client's examples: a
fair coin decides for each run and example. For a run g and an example with label y,

    φ = ln p_y - ln(1 - p_y)

is the model's confidence. The other runs tell how φ is distributed with the example in training and
without: two normal distributions. The ratio of their densities at φ of run g is the score by which
the attack decides whether run g trained on it. With few shadows the variances are those of all
examples together, as the paper advises. Each run is attacked in turn with the help of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.core import Tree, keys
from fedlens.core.federation import Fixed, Holdings, offsets_of
from fedlens.engines import Stacked
from fedlens.privacy.one_run import best_bound
from fedlens.rounds import begin
from fedlens.runs.folder import Checkpoint
from fedlens.runs.loop import ActiveRun, run_to_end
from fedlens.runs.records import Record
from fedlens.setup import Setup
from fedlens.setup.network import make_network

COINS = keys.purpose("audit coins")
FEW = 64  # shadows: with fewer of them, an example's own variance says too little
AT_ONCE = 500  # images

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Roc:
    """The share of members found against the share of others taken for members."""

    false: Array  # rising from 0 to 1
    true: Array

    @classmethod
    def of(cls, scores: Array, member: Array) -> Roc:
        """From scores [n], higher for members; equal scores are decided alike."""
        order = np.argsort(-scores, kind="stable")
        ranked, hits = scores[order], member[order]
        ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
        true, false = np.cumsum(hits)[ends], np.cumsum(~hits)[ends]
        total = max(int(hits.sum()), 1), max(int((~hits).sum()), 1)
        return cls(np.append(0, false) / total[1], np.append(0, true) / total[0])

    @property
    def area(self) -> float:
        """0.5 for guesses by chance."""
        return float(np.trapezoid(self.true, self.false))

    def true_at(self, false: float) -> float:
        """The share of members found if at most this share of the others is taken for members."""
        return float(self.true[self.false <= false].max())


@dataclass(frozen=True)
class Membership:
    """What the attack found: scores of every run and example, and the truth."""

    scores: Array  # [G, n] log likelihood ratios
    plain: Array  # [G, n] φ itself: what an attacker without shadow runs would use
    member: Array  # [G, n] bool
    labels: Array  # [n]
    clients: Array  # [n] who holds it
    accuracy: Array  # [G] of each run's model on the examples that it did not train on

    def bound(self, delta: float) -> float:
        """A lower bound of the ε of one example: that of the first run, by its coins."""
        return best_bound(self.scores[0], self.member[0], delta)[0]

    def roc(self, which: Array | None = None, plain: bool = False) -> Roc:
        """Of some examples, or of all."""
        scores, member = self.plain if plain else self.scores, self.member
        chosen = slice(None) if which is None else which
        return Roc.of(scores[:, chosen].ravel(), member[:, chosen].ravel())


def audit(setup: Setup, shadows: int, tell: Callable[[int, int], None] | None = None) -> Membership:
    """Train the shadow runs of an experiment, and attack each of them.

    `tell` is called after each of their rounds with the rounds of all so far, and the total.
    """
    federation, experiment = setup.federation, setup.experiment
    everyone = check(setup, shadows)
    member = coins(len(everyone.index), shadows, experiment.seed)
    done = count(1)

    def told(record: Record) -> None:
        if tell is not None:
            tell(next(done), shadows * experiment.rounds)

    runs = []
    for shadow, chosen in enumerate(member):
        own = replace(experiment, seed=experiment.seed + shadow)
        some = replace(federation, split=Fixed(_part(everyone, chosen)))
        network = setup.network if not shadow else make_network(own, setup.dataset)[0]
        one = replace(setup, experiment=own, federation=some, client_tests=None, parts={})
        state = begin(network, one.program, some, one.device)
        runs.append(ActiveRun(one, Checkpoint(state), watch=told))
    if isinstance(setup.engine, Stacked):
        results = run_to_end(runs, keep_states=False)
    else:
        results = [result for run in runs for result in run_to_end([run], keep_states=False)]
    plain, right = [], []
    for shadow, model in enumerate(result.tensors for result in results):
        confidences, hits = _confidences(setup, model, everyone.index)
        plain.append(confidences)
        right.append(hits[~member[shadow]].mean())
    found = np.stack(plain)
    return Membership(
        scores=likelihood_ratios(found, member),
        plain=found,
        member=member,
        labels=federation.labels[everyone.index].numpy(),
        clients=everyone.owners.numpy(),
        accuracy=np.array(right),
    )


def check(setup: Setup, shadows: int) -> Holdings:
    """Who holds what; a ValueError if that, or the number of shadow runs, allows no attack."""
    if shadows < 4:
        raise ValueError(f"shadows is {shadows}: choose 4 or more")
    split = setup.federation.split
    if not isinstance(split, Fixed):
        raise ValueError("its clients have new data in every round: nobody is in or out of a run")
    return split.everyone


def coins(examples: int, shadows: int, seed: int) -> Array:  # [G, n] bool
    """Which runs train on which examples: each by a fair coin of its own."""
    draw = np.random.default_rng(int(keys.root(seed, COINS)) % 2**63)
    return draw.random((shadows, examples)) < 0.5


def _part(everyone: Holdings, chosen: Array) -> Holdings:
    """The same clients with these examples alone."""
    keep = torch.from_numpy(chosen)
    sizes = torch.bincount(everyone.owners[keep], minlength=len(everyone))
    return Holdings(everyone.index[keep], offsets_of(sizes), everyone.names)


def _confidences(setup: Setup, model: Tree, index: Tensor) -> tuple[Array, Array]:
    examples, found, hits = setup.federation.examples, [], []
    for some in torch.split(index, AT_ONCE):
        logits = setup.network.predict(model, {}, examples.read(some)).double().cpu()
        labels = examples.labels[some].cpu()
        found.append(confidence(logits, labels))
        hits.append(logits.argmax(1) == labels)
    return torch.cat(found).numpy(), torch.cat(hits).double().numpy()


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """φ = ln p_y - ln(1 - p_y), from logits without overflow."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return (own[:, 0] - others.logsumexp(1)).clamp(-1e3, 1e3)


def likelihood_ratios(confidences: Array, member: Array) -> Array:  # [G, n]
    """ln N(φ; in) - ln N(φ; out) for each run, the others telling the distributions."""
    found = np.empty_like(confidences)
    own_variance = len(confidences) >= FEW
    for shadow in range(len(confidences)):
        others = np.arange(len(confidences)) != shadow
        value, ratio = confidences[shadow], np.zeros(confidences.shape[1])
        for sign, chosen in ((1, member[others]), (-1, ~member[others])):
            mean, variance = _normal(confidences[others], chosen, own_variance)
            # The factor is for how well a mean of few values is known.
            away = (value - mean) ** 2 / (variance * (1 + 1 / chosen.sum(0).clip(1)))
            ratio = ratio - sign * 0.5 * (away + np.log(variance))
        ratio[member[others].all(0) | ~member[others].any(0)] = 0.0  # nothing to compare with
        found[shadow] = ratio
    return found


def _normal(values: Array, chosen: Array, own_variance: bool) -> tuple[Array, Array]:
    """Mean [n] and variance, of each example or of all together, over the chosen runs."""
    count = chosen.sum(0).clip(1)
    mean = (values * chosen).sum(0) / count
    squares = (((values - mean) * chosen) ** 2).sum(0)
    if own_variance:
        return mean, np.maximum(squares / np.maximum(count - 1, 1), 1e-9)
    return mean, np.maximum(squares.sum() / max(int((count - 1).sum()), 1), 1e-9)
