"""Membership inference by the likelihood ratio attack (LiRA; Carlini et al., S&P 2022).

G shadow runs are trained, side by side on a GPU, each on about half of every client's examples: a
fair coin decides for each run and example. For a run g and an example with label y,

    φ = ln p_y - ln(1 - p_y)

is the model's confidence. The other runs tell how φ is distributed with the example in training and
without: two normal distributions. The ratio of their densities at φ of run g is the score by which
the attack decides whether run g trained on it. With few shadows the variances are those of all
examples together, as the paper advises. Each run is attacked in turn with the help of the others.

Is the noise what the run claims? Measured by canaries: updates, or gradients, that are known.

If clients are protected, some of them send, in place of an update, a random direction of their own
that is longer than any clip, or zeros: a fair coin of each decides. Whoever has the first and the
last model compares the move between them with each direction (Andrew et al., ICLR 2024,
arXiv:2302.03098): a high product says that the direction was sent. The guesses give a lower bound
of ε (`privacy/one_run.py`), which must not be above the ε that the run claims.

If examples are protected, the client that spends most trains alone, as the server sees it, with
canaries among its examples: their gradients are ten times the clip, each along coordinates that
no other one has; they come into batches by the chance of an example, and are clipped as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count

import numpy as np
import torch
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import Uniformly
from fedlens.algorithm.private import ClipAndNoise
from fedlens.algorithm.slots import Uploading
from fedlens.config.protection import protects_examples
from fedlens.core import Local, Tree, Upload, keys
from fedlens.core.federation import Fixed, Holdings, offsets_of
from fedlens.engines import Stacked
from fedlens.evaluation.evaluate import batch_of
from fedlens.network import private as gradients
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.one_run import Array, best_bound
from fedlens.rounds import begin
from fedlens.runs.folder import Checkpoint
from fedlens.runs.loop import ActiveRun, run_to_end
from fedlens.runs.progress import Watch
from fedlens.runs.records import Record
from fedlens.setup import Setup
from fedlens.setup.network import starting_module

COINS = keys.purpose("audit coins")
FEW = 64  # shadows: with fewer of them, an example's own variance says too little


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
        network = setup.network.starting_at(starting_module(own, setup.dataset)[0])
        one = replace(setup, experiment=own, federation=some, client_tests=None, parts={})
        state = begin(network, one.program, some, one.device)
        runs.append(ActiveRun(one, Checkpoint(state), watch=told))
    if isinstance(setup.engine, Stacked):
        results = run_to_end(runs, keep_states=False)
    else:
        results = [result for run in runs for result in run_to_end([run], keep_states=False)]
    models = [result.tensors for result in results]
    labels = federation.labels[everyone.index]
    rows = [everyone.index.to(federation.examples.labels.device)] * shadows
    batch = batch_of(setup.engine, federation.examples)
    plain, right = [], []
    answers = setup.engine.predict_each(models.__getitem__, federation.examples, rows, batch)
    for chosen, logits in zip(member, answers, strict=True):
        logits = logits.double().cpu()
        plain.append(confidence(logits, labels).numpy())
        right.append((logits.argmax(1) == labels).double().numpy()[~chosen].mean())
    found = np.stack(plain)
    return Membership(
        scores=likelihood_ratios(found, member),
        plain=found,
        member=member,
        labels=labels.numpy(),
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


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """φ = ln p_y - ln(1 - p_y), from logits without overflow."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return (own[:, 0] - others.logsumexp(1)).clamp(-1e3, 1e3)


def likelihood_ratios(confidences: Array, member: Array) -> Array:  # [G, n]
    """ln N(φ; in) - ln N(φ; out) for each run, the others telling the distributions."""
    ratios, known = np.zeros(confidences.shape), True
    for sign, chosen in ((1, member), (-1, ~member)):
        centre = (confidences * chosen).sum(0) / chosen.sum(0).clip(1)
        away = confidences - centre
        own, others = away * chosen, chosen.sum(0) - chosen  # what a run adds, and how many others
        mean = -own / others.clip(1)  # of the others, from the centre
        squares = (own**2).sum(0) - own**2 - others * mean**2
        if len(confidences) >= FEW:
            variance = squares / (others - 1).clip(1)
        else:  # of all examples together
            free = (others - 1).clip(0).sum(1, keepdims=True)
            variance = squares.sum(1, keepdims=True) / free.clip(1)
        variance = variance.clip(1e-9)
        # The factor is for how well a mean of few values is known.
        apart = (away - mean) ** 2 / (variance * (1 + 1 / others.clip(1)))
        ratios -= sign * 0.5 * (apart + np.log(variance))
        known &= others > 0
    return np.where(known, ratios, 0.0)  # 0 where there is nothing to compare with


CANARIES = keys.purpose("audit canaries")
MOST = 500  # canaries; at most every second client is one
FEWEST = 30  # coordinates of the gradient of an example that is one
LENGTH = 1e6  # of what a canary sends, before it is clipped


@dataclass(frozen=True)
class Measured:
    """The ε that a run claims, and the least that it has, with 95% confidence."""

    claimed: float
    at_least: float
    canaries: int
    guesses: int
    right: int
    unit: str = "client"

    @property
    def holds(self) -> bool:
        """Whether the measurement does not contradict the claim."""
        return self.at_least <= self.claimed


@dataclass(frozen=True)
class SendCanary:
    """What the first clients send: their own direction, or zeros; all others send `inner`."""

    inner: Uploading
    member: tuple[bool, ...]
    key: int

    def __call__(self, local: Local) -> Upload:
        upload = self.inner(local)
        assert local.clients is not None
        update = {name: t.clone() for name, t in upload.update.items()}
        for row, client in enumerate(local.clients.tolist()):
            if client < len(self.member):
                sent = LENGTH * direction(self.key, client, update) * self.member[client]
                sizes = [t[row].numel() for t in update.values()]
                for t, part in zip(update.values(), torch.split(sent, sizes), strict=True):
                    t[row] = part.view_as(t[row]).to(t)
        return replace(upload, update=update)


def direction(key: int, client: int, update: Tree) -> Tensor:  # [n] float64, of norm 1
    """The direction of a canary, in the space of all parameters [C, ...]."""
    size = sum(t[0].numel() for t in update.values())
    drawn = keys.normals(keys.fold(torch.tensor(key), client), size)
    found: Tensor = drawn / torch.linalg.vector_norm(drawn)
    return found


@dataclass(frozen=True)
class AddCanaries:
    """Adds the gradients of canaries to the sum of a batch: of those that are in, by chance."""

    member: tuple[bool, ...]
    rate: float
    clip: float
    key: int

    def __call__(self, sums: Tree, local: Local) -> Tree:
        count, device = len(self.member), next(iter(sums.values())).device
        own = keys.fold(local.key("canaries")[:, None], torch.arange(count, device=device))
        drawn = (keys.uniform(own) < self.rate) & torch.tensor(self.member, device=device)
        sizes = [t[0].numel() for t in sums.values()]
        owner, along = coordinates(self.key, sum(sizes), count)
        length = torch.full((len(drawn), 1), 10 * self.clip, dtype=torch.float64, device=device)
        length = length * gradients.clip_factors(length.square(), self.clip)
        added = drawn[:, owner.to(device)] * length * along.to(device)  # [C, n]
        parts = zip(sums.items(), torch.split(added, sizes, 1), strict=True)
        return {name: t + part.view_as(t).to(t) for (name, t), part in parts}


@lru_cache(maxsize=2)
def coordinates(key: int, size: int, count: int) -> tuple[Tensor, Tensor]:
    """For each of `size` coordinates the canary that has it, and its entry there: norm 1 each."""
    draw = np.random.default_rng(key % 2**63)
    owner = torch.from_numpy(draw.permutation(size) % count)
    signs = torch.from_numpy(draw.choice([-1.0, 1.0], size))
    return owner, signs / torch.bincount(owner).double().sqrt()[owner]


def measure(setup: Setup, watch: Watch | None = None) -> Measured:
    """Run a private experiment with canaries, and guess which of them were in."""
    if setup.experiment.scheduled(0):
        raise ValueError("its numbers change over rounds: audit it without schedules")
    if protects_examples(setup.experiment):
        return _of_examples(setup, watch)
    return _of_clients(setup, watch)


def _of_clients(setup: Setup, watch: Watch | None) -> Measured:
    """With canaries in place of the first clients."""
    experiment, algorithm = setup.experiment, setup.program.algorithm
    steps = [step for step in algorithm.channel if isinstance(step, ClipAndNoise)]
    if experiment.privacy is None:
        raise ValueError("it claims no privacy: give it [privacy]")
    if not steps:
        raise ValueError("canaries measure the server's noise: leave aggregation.secure out")
    protection = steps[0].privacy
    if protection.noise_cohort != protection.cohort:
        raise ValueError("its noise is for a larger federation: leave privacy.noise_cohort out")
    count = min(setup.federation.num_clients // 2, MOST)
    key, member = _coins(setup, count)
    sends = SendCanary(algorithm.upload, tuple(member.tolist()), key)
    moved = _moved(setup, replace(algorithm, upload=sends), watch)
    flat = torch.cat([t.flatten() for t in moved.values()])
    scores = np.array([float(direction(key, one, moved) @ flat) for one in range(count)])
    delta = experiment.privacy.delta
    claimed = epsilon(protection.released(experiment.rounds), delta)
    return Measured(claimed, *_bound(scores, member, delta))


def _of_examples(setup: Setup, watch: Watch | None) -> Measured:
    """With canaries among the examples of the client that spends most."""
    experiment, algorithm = setup.experiment, setup.program.algorithm
    given, private, found = experiment.privacy, algorithm.objective.private, setup.examples
    assert given is not None and private is not None
    dearest = found.dearest(found.rounds, given.delta)
    turns = found.turns(found.rounds)
    (client, *_) = np.flatnonzero(
        (found.rates == dearest.rate) & (turns * found.steps == dearest.steps)
    ).tolist()
    held = setup.federation.everyone(0).take(torch.tensor([client]))
    own = replace(
        setup,
        experiment=replace(experiment, rounds=int(turns[client])),
        federation=replace(setup.federation, split=Fixed(held)),
    )
    size = setup.network.num_parameters
    count = min(size // FEWEST, MOST)
    key, member = _coins(setup, count)
    adds = AddCanaries(tuple(member.tolist()), dearest.rate, float(private.clip), key)
    objective = replace(algorithm.objective, private=replace(private, adds=adds))
    algorithm = replace(algorithm, select=Uniformly(1), objective=objective)
    moved = _moved(own, algorithm, watch)
    owner, along = coordinates(key, size, count)
    flat = -torch.cat([t.flatten() for t in moved.values()])  # steps go against gradients
    scores = torch.zeros(count, dtype=torch.float64).index_add_(0, owner, along * flat).numpy()
    claimed = found.epsilon(found.rounds, given.delta)
    return Measured(claimed, *_bound(scores, member, given.delta), unit="example")


def _coins(setup: Setup, count: int) -> tuple[int, Array]:
    """A key for what canaries look like, and which of them are in."""
    key = int(keys.root(setup.experiment.seed, CANARIES))
    return key, np.random.default_rng(key % 2**63).random(count) < 0.5


def _moved(setup: Setup, algorithm: Algorithm, watch: Watch | None) -> Tree:  # [1, ...]
    """How far the model moves in a run with this algorithm."""
    program = replace(setup.program, algorithm=algorithm)
    own = replace(setup, program=program, parts={}, client_tests=None)
    state = begin(own.network, program, own.federation, own.device)
    (result,) = run_to_end([ActiveRun(own, Checkpoint(state), watch=watch)], keep_states=False)
    return {
        n: (result.tensors[n].double() - t.double())[None].cpu() for n, t in state.params.items()
    }


def _bound(scores: Array, member: Array, delta: float) -> tuple[float, int, int, int]:
    at_least, guesses, right = best_bound(scores, member, delta)
    return at_least, len(scores), guesses, right
