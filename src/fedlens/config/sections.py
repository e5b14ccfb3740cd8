"""The sections of an experiment: its tables, each checked separately."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from fedlens.config.names import (
    ANNEALS,
    CLIPS,
    DEVICES,
    MECHANISMS,
    METRICS,
    OPTIMIZERS,
    PARTITIONS,
    SCHEDULES,
)
from fedlens.config.options import Bounds, Given, Named, check, default, types_of

Table = Mapping[str, Any]
Name = str | Table | Named
"""How something is chosen: by a name, by a table with a name and options, or by both as `Named`."""

Number = Given[float | Table | Named, float | Named]
NumberOrNone = Given[float | Table | Named | None, float | Named | None]
Scheduled = Annotated[Number, SCHEDULES]
"""A number, or a schedule that gives it for every round."""
ScheduledOrNone = Annotated[NumberOrNone, SCHEDULES]

Count = Annotated[int, Bounds(least=1)]
WholeNumber = Annotated[int, Bounds(least=0)]
Chance = Annotated[float, Bounds(least=0, most=1)]
Share = Annotated[float, Bounds(above=0, below=1)]
Factor = Annotated[float, Bounds(least=0, most=10)]

R = TypeVar("R")
OrTable = Given[R | Table, R]
"""A record, or a table of its fields."""

DecayOn = Literal["all", "weights"]
Part = Literal["test", "validation", "train"]

ALWAYS_MEASURED = "loss", "accuracy", "top5", "precision", "recall", "f1", "classes_predicted"
"""What every evaluation measures; metrics of `evaluate.metrics` are added."""


def check_fields(self: Any, prefix: str) -> None:
    """Check every field of a dataclass against its type; tables become records."""
    hints = types_of(self.__class__)
    for f in fields(self):
        value = check(getattr(self, f.name), hints[f.name], prefix + f.name)
        object.__setattr__(self, f.name, value)


def demand(fits: bool, key: str, value: Any, remedy: str) -> None:
    if not fits:
        raise ValueError(f"{key} is {value!r}: {remedy}")


@dataclass(frozen=True)
class Clients:
    count: Count | None = None
    """how many clients there are; without it 10, or as many as the partition finds in the data"""
    per_round: Count | Annotated[float, Bounds(above=0, most=1)] = 1.0
    """how many take part in a round: `10` means ten, `0.1` a tenth of them (`1` means one, `1.0`
    all)"""
    partition: Annotated[Given[Name, Named], PARTITIONS] = default(Named("auto"))
    """who holds which examples: see [partitions.md](partitions.md). `auto`: the data set's own
    clients if it has any (`femnist`, `omniglot`, the large sets, a `csv` with a column `client`, a
    `folder` of sites), else `iid`"""
    seed: WholeNumber | None = None
    """fixes the split alone; without it, `seed` does"""
    holdout: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """the share of its examples on which each client is tested and not trained"""
    unseen: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """the share of clients that never train in the rounds: at the end each adapts the model to its
    own examples, and is tested: see [personal.md](personal.md#clients-that-come-later)"""
    devices: Annotated[Given[Name | None, Named | None], DEVICES] = default(None)
    """how fast clients are, and when they are there: see [faults.md](faults.md#devices). With it
    the run has a virtual clock"""

    def __post_init__(self) -> None:
        check_fields(self, "clients.")
        if self.count is not None and isinstance(self.per_round, int):
            train = self.count - self.num_unseen
            remedy = f"there are {train} clients that train: choose 1 to {train}"
            demand(self.per_round <= train, "clients.per_round", self.per_round, remedy)
        fits = self.holdout == 0 or 1e-6 <= self.holdout < 1
        demand(fits, "clients.holdout", self.holdout, "choose 0, or 0.000001 to below 1")

    @property
    def num_unseen(self) -> int:
        """How many clients never train in the rounds; `count` must be known."""
        assert self.count is not None
        return min(round(self.unseen * self.count), self.count - 1)

    @property
    def cohort(self) -> int:
        """How many clients take part in a round; `count` must be known."""
        if isinstance(self.per_round, int):
            return self.per_round
        assert self.count is not None
        # 0.29 * 100 = 28.999999999999996 must count as 29 clients.
        return max(int(self.per_round * (self.count - self.num_unseen) + 1e-9), 1)


@dataclass(frozen=True)
class Between:
    """A number that is drawn for each client and round: a whole one if both bounds are."""

    low: int | float
    high: int | float


@dataclass(frozen=True)
class Constants:
    """What images of 0 to 1 are normalised by: a number for all channels, or one for each."""

    mean: float | tuple[float, ...]
    deviation: float | tuple[float, ...]

    def __post_init__(self) -> None:
        check_fields(self, "normalise.")
        for key, value in vars(self).items():
            numbers = value if isinstance(value, tuple) else (value,)
            fits = bool(numbers) and all(map(math.isfinite, numbers))
            fits = fits and (key == "mean" or min(numbers) > 0)
            least = " above 0" * (key == "deviation")
            demand(fits, f"normalise.{key}", value, f"give a number{least}, or one a channel")

    def of(self, channels: int) -> list[tuple[float, ...]]:
        """Mean and deviation of each channel."""
        found = [
            value if isinstance(value, tuple) else (value,) * channels
            for value in (self.mean, self.deviation)
        ]
        for key, value in zip(("mean", "deviation"), found, strict=True):
            remedy = f"the images have {channels} channels: give a number for each, or one for all"
            demand(len(value) == channels, f"normalise.{key}", list(value), remedy)
        return found


@dataclass(frozen=True)
class LocalTraining:
    epochs: OrTable[Annotated[int | float, Bounds(above=0)] | Between] = default(1)
    """how often a client goes through its examples in a round: parts of epochs and ranges, too, see
    [schedules.md](schedules.md#local-work) (`fedvc`, `liadmm` and `celiadmm` have a rule of their
    own)"""
    batch_size: Count = 32
    """the last batch of an epoch may be smaller"""
    lr: Annotated[Scheduled, Bounds(least=0)] = default(0.1)
    """the clients' learning rate: see [schedules.md](schedules.md)"""
    momentum: Annotated[Scheduled, Bounds(least=0, below=1)] = default(0.0)
    """the clients' heavy-ball momentum. `celiadmm` and `liadmm` (unless `local = "training"`)
    refuse it"""
    weight_decay: Annotated[Scheduled, Bounds(least=0)] = default(0.0)
    """weight decay, as the optimiser of that name in `torch.optim` has it. `celiadmm` and `liadmm`
    (unless `local = "training"`) refuse it"""
    weight_decay_on: DecayOn = "all"
    """which parameters decay. `all`; or `weights`: only those of two axes and more, so that biases
    and normalisation layers do not"""
    optimizer: Annotated[Given[Name, Named], OPTIMIZERS] = default(Named("sgd"))
    """how a client steps: see [Local training](training.md#local-training)"""
    clip: Annotated[ScheduledOrNone, Bounds(above=0)] = default(None)
    """scale a client's gradient down to this norm, if it is longer, as
    `torch.nn.utils.clip_grad_norm_` does (the algorithm `clip` shortens whole updates)"""
    clip_value: Annotated[ScheduledOrNone, Bounds(above=0)] = default(None)
    """let no number of a gradient go beyond ± this; with both, it comes before `local.clip`"""
    class_balance: Chance = 0.0
    """let examples of rare classes count more, by the effective numbers of the class-balanced loss:
    its β, customarily 0.9 to 0.9999; 0: all examples count alike; 1: all classes, by inverse
    frequency"""
    reset: bool = True
    """what the optimiser remembers (momentum, Adam's means and its count of steps) starts afresh
    every round; with `false` each client keeps its own, and nothing else that local training
    remembers"""
    steps: OrTable[Count | Between | None] = default(None)
    """this many batches a round instead of `local.epochs`: see
    [schedules.md](schedules.md#local-work)"""
    max_steps: Count | None = None
    """no client takes more steps in a round"""
    anneal: Annotated[Given[Name | None, Named | None], ANNEALS] = default(None)
    """how the learning rate falls from step to step of a round: see
    [schedules.md](schedules.md#within-a-round)"""

    def __post_init__(self) -> None:
        check_fields(self, "local.")
        if isinstance(self.epochs, Between):
            _demand_range("local.epochs", self.epochs)
        if isinstance(self.steps, Between):
            _demand_range("local.steps", self.steps, whole=True)


def _demand_range(key: str, given: Between, whole: bool = False) -> None:
    """Refuse a range that is empty, or that begins below one step, or not above 0 epochs."""
    low, high, shown = given.low, given.high, vars(given)
    demand(low <= high, key, shown, "let low be no more than high")
    if whole:
        fits = low >= 1 and isinstance(low, int) and isinstance(high, int)
        demand(fits, key, shown, "choose whole numbers of 1 or more")
    demand(low > 0 and high < math.inf, key, shown, "choose numbers above 0")


@dataclass(frozen=True)
class Server:
    lr: Annotated[Scheduled, Bounds(least=0)] = default(1.0)
    """the server's step along the combined update. `fedadam` and its variants, `feddyn` and the
    ADMM family have their own, and refuse it"""

    def __post_init__(self) -> None:
        check_fields(self, "server.")


@dataclass(frozen=True)
class Evaluate:
    every: Count = 1
    """evaluate every this many rounds, and after the last"""
    at: tuple[Count, ...] = ()
    """more rounds after which to evaluate: `[10, 20, 50]`; those after the last round play no
    role"""
    on: Given[Part | Sequence[Part], tuple[Part, ...]] = default(("test",))
    """any of `test`, `validation`, `train`"""
    validation: Share = 0.1
    """the share of the training examples set apart, if `evaluate.on` has `validation` and the data
    have no [validation images](data.md#your-own-images) of their own"""
    twin: bool = False
    """also train the run's centralised twin, and say how near the run came to it: see [The
    twin](measures.md#the-twin)"""
    local_only: bool = False
    """also train each client alone, and say who gains by federating: see [Clients by
    themselves](measures.md#clients-by-themselves)"""
    fine_tune: Annotated[int, Bounds(least=0, most=10_000)] = 0
    """this many passes of each client over its own examples from the final model, tested before and
    after; 10000 are the most"""
    baselines: bool = True
    """if clients have models of their own, by an algorithm, and are tested: also train FedAvg, and
    each client alone, and compare: see [personal.md](personal.md#the-protocol)"""
    bootstrap: Annotated[int, Bounds(least=0, most=100_000)] = 0
    """how often examples, and clients, are resampled for 95% intervals of the final measures: 1000
    is customary, 100000 the most"""
    metrics: Annotated[Given[Name | Sequence[Name], tuple[Named, ...]], METRICS] = default(())
    """what else to measure, by name or of your own: see [Metrics](measures.md#metrics)"""
    best: bool = False
    """keep the model that was best on validation beside the last: see
    [schedules.md](schedules.md#the-best-model)"""

    def __post_init__(self) -> None:
        check_fields(self, "evaluate.")
        names = [named.name.rpartition(":")[2] for named in self.metrics]
        for name in names:
            fits = names.count(name) == 1 and name not in ALWAYS_MEASURED
            demand(fits, "evaluate.metrics", names, f"{name!r} is measured already: leave one out")
        compared = bool(self.on) or not self.twin
        demand(compared, "evaluate.on", list(self.on), "name what a twin is compared on: test")

        by_validation = "validation" in self.on or not self.best
        demand(by_validation, "evaluate.best", True, 'add "validation" to evaluate.on')

    def is_due(self, round: int, rounds: int) -> bool:
        """Whether a run of `rounds` is evaluated after this round."""
        return round % self.every == 0 or round == rounds or round in self.at


@dataclass(frozen=True)
class Stop:
    """Early stopping: a run ends as soon as one of these conditions holds."""

    accuracy: Annotated[float, Bounds(above=0, most=1)] | None = None
    """the run is over when this accuracy is reached: on validation if it is evaluated there, else
    on test"""
    patience: Count | None = None
    """the run is over when this many evaluations on validation in a row were no better than the
    best before them"""
    batches: Count | None = None
    """the run is over when this many were spent: those of the client that takes the most in each
    round, added up (`batches_total`)"""
    bytes: Count | None = None
    """the run is over when this many went up and down, of all clients together"""
    seconds: Annotated[float, Bounds(above=0)] | None = None
    """the run is over when so much time has passed, that of a resumed run before it stopped
    included"""

    def __post_init__(self) -> None:
        check_fields(self, "stop.")


@dataclass(frozen=True)
class Faults:
    """The probability of each fault, for every client that is asked, in every round."""

    absent: Chance = 0.0
    """the chance that it never begins"""
    dropped: Chance = 0.0
    """the chance that it stops at a moment that is uniform over its time"""
    nan: Chance = 0.0
    """the chance that it sends numbers that are none"""
    infinite: Chance = 0.0
    """the chance that it sends infinite ones"""
    huge: Chance = 0.0
    """the chance that it sends an update of absurd length"""
    malformed: Chance = 0.0
    """the chance that it sends wrong shapes"""

    def __post_init__(self) -> None:
        check_fields(self, "faults.")
        both = sum(getattr(self, f.name) for f in fields(self))
        if both > 1:
            raise ValueError(f"faults have chances of {both:g} together: choose 1 or less")


@dataclass(frozen=True)
class Reporting:
    """The server's rules for a round, after Bonawitz et al. (MLSys 2019, arXiv:1902.01046)."""

    over_select: Annotated[float, Bounds(least=1)] = 1.0
    """ask this many times `clients.per_round`, rounded up; the first `clients.per_round` that
    report are taken"""
    deadline: Annotated[float, Bounds(above=0)] | None = None
    """virtual seconds after which nobody is waited for"""
    quorum: Chance = 0.0
    """the share of `clients.per_round` that must report, rounded up; one client always must"""
    below_quorum: Literal["repeat", "stop"] = "repeat"
    """`repeat`: 60 virtual seconds later the round is tried again with other clients. `stop`: the
    run ends, with status `stopped` and what it has"""
    largest: Annotated[float, Bounds(above=0)] | None = None
    """the longest update taken, by the norm of all that a client sends; without it, any that is
    finite (in a [fleet](fleet.md#sites-that-fail), a thousand times the norm of the model)"""

    def __post_init__(self) -> None:
        check_fields(self, "reporting.")

    def needed(self, goal: int, fewest: int) -> int:
        """How many of `goal` clients must report, if combining needs at least `fewest` updates."""
        return max(math.ceil(self.quorum * goal - 1e-9), fewest, 1)

    def rejects(self, norm: float) -> str | None:
        """The reason to reject an update of this norm, or None."""
        if math.isnan(norm):
            return "nan"
        if math.isinf(norm):
            return "infinite"
        return "huge" if self.largest is not None and norm > self.largest else None


@dataclass(frozen=True)
class LowRank:
    """How layers learn by low rank (LoRA): see docs/experiments.md."""

    rank: Count = 8
    """of what is trained beside the weights of linear layers and convolutions of 1 × 1. The head is
    trained whole, and all other layers stay as they are"""


@dataclass(frozen=True)
class Privacy:
    """Differential privacy in training: see docs/privacy.md."""

    unit: Literal["client", "example"] = "client"
    """who is protected: a `client`, with all that it holds, or each single `example`"""
    epsilon: Annotated[float, Bounds(above=0)] | None = None
    """what the whole run may cost: the noise is as small as that allows. Give this, or `noise`"""
    noise: Annotated[float, Bounds(least=0)] | None = None
    """the standard deviation of the noise on the sum of a round (of a batch, to protect examples),
    in clips: ε follows from it"""
    delta: Share = 1e-5
    """the δ that ε is for, below 1 / clients (below 1 / examples of each client)"""
    clip: Annotated[Number, CLIPS, Bounds(above=0)] = default(1.0)
    """the longest update (or gradient of an example) that counts in full: longer ones are shortened
    to it. A number, or `adaptive`"""
    mechanism: Annotated[Given[Name, Named], MECHANISMS] = default(Named("gaussian"))
    """how the noise of the rounds goes together: see [Mechanisms](privacy.md#mechanisms)"""
    sampling: Literal["poisson", "fixed", "all", "cyclic"] | None = None
    """who takes part, and is counted on: see [privacy.md](privacy.md#what-ε-and-δ-mean). Without
    it, what the mechanism needs: `poisson`, or `cyclic` for noise that is correlated over
    rounds"""
    noise_cohort: Count | None = None
    """the noise, and ε, are for this many clients in a round, while `clients.per_round` are
    simulated"""
    population: Count | None = None
    """the clients that those of `noise_cohort` are drawn from; without it, as large a share as here
    takes part"""
    without: Annotated[int, Bounds(least=0)] | None = None
    """with [secure sums](secure.md#noise-of-the-sites): so many clients of a round may be lost or
    lie, and the noise of the others is still enough. Without it, as many as may be lost"""
    count_noise: Annotated[float, Bounds(above=0)] | None = None
    """the standard deviation of the noise on the label counts that clients send once, to protect
    examples in algorithms that need them (`fedns`, `lastfc`)"""
    ledger: str | None = None
    """the file that keeps what was spent on the data, over all experiments that name it: see [The
    ledger](privacy.md#the-ledger)"""

    def __post_init__(self) -> None:
        check_fields(self, "privacy.")
        both = {"epsilon": self.epsilon, "noise": self.noise}
        given = [key for key, value in both.items() if value is not None]
        demand(len(given) == 1, "privacy", both, "give one of epsilon and noise, and not both")
        if self.unit == "example":
            of_clients = {
                "mechanism": self.mechanism.name != "gaussian" and self.mechanism.name,
                "clip": isinstance(self.clip, Named) and self.clip.name,
                "sampling": self.sampling not in (None, "cyclic") and self.sampling,
                "noise_cohort": self.noise_cohort,
            }
            for key, value in of_clients.items():
                remedy = 'that is for unit = "client": leave it out'
                demand(not value, f"privacy.{key}", value, remedy)
        else:
            remedy = 'it is noise for unit = "example": leave it out'
            demand(self.count_noise is None, "privacy.count_noise", self.count_noise, remedy)
        if self.ledger is not None:
            own = self.noise_cohort is None
            demand(own, "privacy.ledger", self.ledger, "it keeps no ε of another noise_cohort")
        if self.population is not None:
            cohort = self.noise_cohort or 0
            fits, remedy = 0 < cohort <= self.population, "give a noise_cohort, at most as large"
            demand(fits, "privacy.population", self.population, remedy)


@dataclass(frozen=True)
class Aggregation:
    """How the updates of a round become a sum: see docs/secure.md."""

    secure: bool | Literal["simulated"] = False
    """`true`, in a [fleet](fleet.md): the server learns the sum of a round's updates, and no
    update. `"simulated"`: the same sums, to the bit, in a simulation, with nothing hidden"""
    clip: Annotated[float, Bounds(above=0)] = 16.0
    """the largest number that a client may send, in its update, beside it, or as its loss. What is
    larger is refused"""
    bits: Annotated[int, Bounds(least=16, most=52)] = 32
    """of every number that is sent, in steps of about `clip` / 2^(`bits` - 1)"""
    threshold: Annotated[float, Bounds(most=1)] = 2 / 3
    """the share of a round's clients that must stay until its end, rounded up: two thirds or more.
    With fewer the round is repeated"""

    def __post_init__(self) -> None:
        check_fields(self, "aggregation.")
        remedy = "choose two thirds or more: a dishonest server could ask two halves differently"
        demand(self.threshold > 0.666, "aggregation.threshold", self.threshold, remedy)
