"""The sections of an experiment: its tables, each checked separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from fedlens.options import Given, Named, check, default, types_of
from fedlens.pieces.solve import DecayOn

Table = Mapping[str, Any]
Name = str | Table | Named
"""How something is chosen: by a name, by a table with a name and options, or by both as `Named`."""

Scheduled = Given[float | Table | Named, float | Named]
"""A number, or a schedule that gives it for every round."""
ScheduledOrNone = Given[float | Table | Named | None, float | Named | None]

SCHEDULED = {
    "local": ("lr", "momentum", "weight_decay", "clip", "clip_value"),
    "server": ("lr",),
}
"""The numbers of each section that a schedule may give."""

R = TypeVar("R")
OrTable = Given[R | Table, R]
"""A record, or a table of its fields."""

Part = Literal["test", "validation", "train"]

MOST_PASSES = 10_000  # of each client over its own examples, after a run
MOST_RESAMPLED = 100_000  # times: the measures of all samples are kept to the end

ALWAYS_MEASURED = "loss", "accuracy", "top5", "precision", "recall", "f1", "classes_predicted"
"""What every evaluation measures; metrics of `evaluate.metrics` are added."""


def settle(self: Any, prefix: str) -> None:
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
    count: int | None = None  # without it 10, or as many as the partition finds in the data
    per_round: int | float = 1.0  # a number of clients, or a share of them
    partition: Given[Name, Named] = default(
        Named("auto")
    )  # the data set's own clients if it has any, else iid
    seed: int | None = None  # of the split alone; without it, the experiment's
    holdout: float = 0.0  # the share of its examples on which a client is tested, not trained
    devices: Given[Name | None, Named | None] = default(None)  # how fast, and when available

    def __post_init__(self) -> None:
        settle(self, "clients.")
        if self.count is not None:
            demand(self.count >= 1, "clients.count", self.count, "choose 1 or more")
        if isinstance(self.per_round, float):
            fits = 0 < self.per_round <= 1
            demand(fits, "clients.per_round", self.per_round, "a share lies in (0, 1]")
        elif self.count is None:
            demand(self.per_round >= 1, "clients.per_round", self.per_round, "choose 1 or more")
        else:
            fits = 1 <= self.per_round <= self.count
            remedy = f"there are {self.count} clients: choose 1 to {self.count}"
            demand(fits, "clients.per_round", self.per_round, remedy)
        if self.seed is not None:
            demand(self.seed >= 0, "clients.seed", self.seed, "choose 0 or more")
        fits = self.holdout == 0 or 1e-6 <= self.holdout < 1
        demand(fits, "clients.holdout", self.holdout, "choose 0, or 0.000001 to below 1")

    @property
    def cohort(self) -> int:
        """How many clients take part in a round; `count` must be known."""
        if isinstance(self.per_round, int):
            return self.per_round
        assert self.count is not None
        # 0.29 * 100 = 28.999999999999996 must count as 29 clients.
        return max(int(self.per_round * self.count + 1e-9), 1)


@dataclass(frozen=True)
class Between:
    """A number that is drawn for each client and round: a whole one if both bounds are."""

    low: int | float
    high: int | float


@dataclass(frozen=True)
class LocalTraining:
    epochs: OrTable[int | float | Between] = default(1)  # a fraction is rounded up to batches
    batch_size: int = 32
    lr: Scheduled = default(0.1)
    momentum: Scheduled = default(0.0)
    weight_decay: Scheduled = default(0.0)
    weight_decay_on: DecayOn = "all"  # parameters, or only weights: no biases, no normalisation
    optimizer: Given[Name, Named] = default(Named("sgd"))
    clip: ScheduledOrNone = default(None)  # the norm to which a longer gradient is scaled down
    clip_value: ScheduledOrNone = default(None)  # to which entries of a gradient are clamped
    class_balance: float = 0.0  # how much more examples of rare classes count
    reset: bool = True  # the state of the optimiser is reset in every round
    steps: OrTable[int | Between | None] = default(None)  # batches, in place of epochs
    max_steps: int | None = None  # that any client takes in a round
    anneal: Given[Name | None, Named | None] = default(None)  # of lr within a round

    def __post_init__(self) -> None:
        settle(self, "local.")
        for name in ("batch_size", "max_steps"):
            count = getattr(self, name)
            demand(count is None or count >= 1, f"local.{name}", count, "choose 1 or more")
        _demand_amount("local.epochs", self.epochs)
        if self.steps is not None:
            _demand_amount("local.steps", self.steps, whole=True)
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            demand(_is_step(value), f"local.{name}", value, "choose 0 or more")
        momentum = self.momentum
        fits = isinstance(momentum, Named) or momentum < 1
        demand(fits, "local.momentum", momentum, "choose 0 to below 1")
        fits = 0 <= self.class_balance < 1
        demand(fits, "local.class_balance", self.class_balance, "choose 0 to below 1")
        for name in ("clip", "clip_value"):
            value = getattr(self, name)
            fits = value is None or (value != 0 and _is_step(value))
            demand(fits, f"local.{name}", value, "choose a number above 0, or leave it out")


def _demand_amount(key: str, given: float | Between, whole: bool = False) -> None:
    """Refuse an amount that is below one step, or not above 0 epochs."""
    both = (given.low, given.high) if isinstance(given, Between) else (given, given)
    (low, high), shown = both, vars(given) if isinstance(given, Between) else given
    demand(low <= high, key, shown, "let low be no more than high")
    if whole:
        fits = low >= 1 and all(isinstance(number, int) for number in both)
        demand(fits, key, shown, "choose whole numbers of 1 or more")
    demand(low > 0 and high < float("inf"), key, shown, "choose a number above 0")


@dataclass(frozen=True)
class Server:
    lr: Scheduled = default(1.0)

    def __post_init__(self) -> None:
        settle(self, "server.")
        demand(_is_step(self.lr), "server.lr", self.lr, "choose 0 or more")


def _is_step(value: float | Named) -> bool:
    """Whether a number is finite and not negative; schedules are checked once rounds are known."""
    return isinstance(value, Named) or 0 <= value < float("inf")


@dataclass(frozen=True)
class Evaluate:
    every: int = 1  # rounds
    at: tuple[int, ...] = ()  # more rounds
    on: Given[Part | Sequence[Part], tuple[Part, ...]] = default(("test",))
    validation: float = 0.1  # the share of train set apart for validation, if data have none
    twin: bool = False  # also train a centralised twin, and compare the run with it
    local_only: bool = False  # also train each client alone, and say which gain by federating
    fine_tune: int = 0  # passes of each client over its own examples, from the final model
    bootstrap: int = 0  # how often examples and clients are resampled, for intervals at the end
    metrics: Given[Name | Sequence[Name], tuple[Named, ...]] = default(())  # besides the usual
    best: bool = False  # also keep the model that is best on validation

    def __post_init__(self) -> None:
        settle(self, "evaluate.")
        demand(self.every >= 1, "evaluate.every", self.every, "choose 1 or more")
        numbered = all(round >= 1 for round in self.at)
        demand(numbered, "evaluate.at", list(self.at), "rounds are counted from 1")
        fits = 0 < self.validation < 1
        demand(fits, "evaluate.validation", self.validation, "choose a share between 0 and 1")
        fits = 0 <= self.fine_tune <= MOST_PASSES
        demand(fits, "evaluate.fine_tune", self.fine_tune, f"choose 0 to {MOST_PASSES}")
        fits = 0 <= self.bootstrap <= MOST_RESAMPLED
        demand(fits, "evaluate.bootstrap", self.bootstrap, f"choose 0 to {MOST_RESAMPLED}")
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

    accuracy: float | None = None  # reached, on validation if there is one, else on test
    patience: int | None = None  # evaluations on validation in a row without a new best
    batches: int | None = None  # of the client that takes the most in each round, added up
    bytes: int | None = None  # up and down, of all clients
    seconds: float | None = None  # of wall-clock time

    def __post_init__(self) -> None:
        settle(self, "stop.")
        if self.accuracy is not None:
            fits = 0 < self.accuracy <= 1
            demand(fits, "stop.accuracy", self.accuracy, "choose a share above 0, up to 1")
        for name in ("patience", "batches", "bytes", "seconds"):
            value = getattr(self, name)
            demand(value is None or value > 0, f"stop.{name}", value, "choose a number above 0")
