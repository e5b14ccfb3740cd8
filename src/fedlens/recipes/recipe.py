"""A recipe: the experiments behind a table or figure, and how to show their results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from fedlens.config.experiment import Experiment, Named
from fedlens.config.options import did_you_mean
from fedlens.data import DATASETS, Source
from fedlens.data.places import roots
from fedlens.recipes import ScaleName
from fedlens.storage.tables import apply_override

if TYPE_CHECKING:
    from fedlens.report.blocks import Block
    from fedlens.runs.records import Run

T = TypeVar("T")
EMBEDDED = "fashion-mnist-mini"
NUM_CLASSES = {
    **dict.fromkeys(("fashion-mnist", "mnist", "cifar10"), 10),
    **{"cifar100": 100, "tiny-imagenet": 200},
}
"""Of whole data sets: runs may have only some of the classes."""
FROM_CELL = "cell:"  # prefix of the cell whose final model another cell starts from


class Recorded(NamedTuple):
    """What stored runs were made with, if a page is drawn from them and nothing is run."""

    datasets: frozenset[str]
    weights: tuple[str, ...]  # files of initial weights


@dataclass(frozen=True)
class Scale:
    """How much of a paper is run: `smoke` takes seconds, `small` minutes, `paper` is all of it."""

    name: ScaleName
    data: Path | None = None  # where data sets are searched first
    recorded: Recorded | None = None  # used instead of the data on this machine

    def __post_init__(self) -> None:
        if self.name not in get_args(ScaleName):
            hint = did_you_mean(self.name, get_args(ScaleName))
            raise ValueError(f"scale is {self.name!r}: {hint}")

    def pick(self, smoke: T, small: T, paper: T) -> T:
        """The value for this scale."""
        return {"smoke": smoke, "small": small, "paper": paper}[self.name]

    @property
    def engine(self) -> Literal["auto", "sequential"]:
        """At `smoke` clients are trained one after another, which starts no process."""
        return "sequential" if self.name == "smoke" else "auto"

    def experiment(
        self,
        dataset: str,
        model: tuple[str | Named, str | Named, str | Named],
        rounds: tuple[int, int, int],
        **more: Any,
    ) -> Experiment:
        """An experiment with the paper's data set, or what takes its place here."""
        used, made = self.dataset(dataset), self.pick(*model)
        return Experiment(used, made, self.pick(*rounds), engine=self.engine, **more)

    def dataset(self, wanted: str) -> str:
        """The data set to use for the paper's `wanted`.

        At `smoke` it is the embedded one, and at `small` if the wanted one is not on this machine.
        At `paper` it must be.
        """
        if self.name == "smoke":
            return EMBEDDED
        if self.has(wanted):
            return wanted
        if self.name == "small":
            return EMBEDDED
        if self.recorded:
            raise ValueError(f"the records have no run on {wanted}: name others, or run it")
        DATASETS[wanted](Source(self.data))  # raises: where it was searched, and what to do
        raise AssertionError(f"{wanted} is here after all")

    def instead(self, wanted: str) -> str:
        """A sentence about the data set that replaces `wanted`, if one does."""
        if self.dataset(wanted) == wanted:
            return ""
        words = f"The tenth of Fashion-MNIST inside Fedlens takes the place of {wanted}"
        return f"{words}." if self.name == "smoke" else f"{words}, which is not on this machine."

    def has(self, dataset: str) -> bool:
        """Whether a data set is on this machine or, if a page is drawn from records, in these."""
        return dataset in self.recorded.datasets if self.recorded else self.holds(dataset)

    def holds(self, dataset: str) -> bool:
        """Whether a data set is on this machine, even if a page is drawn from records."""
        return dataset in self._here

    def weights(self, model: str) -> str | None:
        """torchvision's weights file named after a model, if it is in a folder of data sets."""
        if self.recorded:
            files = map(Path, self.recorded.weights)
            return next((str(file) for file in files if file.name.startswith(model)), None)
        for root in roots(Source(self.data)):
            for pattern in (f"weights/{model}*", f"{model}*"):
                for file in sorted(root.glob(pattern)):
                    if file.suffix in (".safetensors", ".pth", ".pt"):
                        return str(file.resolve())
        return None

    @cached_property
    def _here(self) -> frozenset[str]:
        from fedlens.data.fetch import named_sets

        return frozenset(row.name for row in named_sets(Source(self.data)) if row.where)


class Measured(NamedTuple):
    """The mean of a number over seeds."""

    mean: float
    std: float | None  # sample standard deviation; None for one seed
    seeds: int
    runs: int = 1  # all runs; `seeds` of them have the number

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Measured | None:
        """The mean over the finite values; None if there are none."""
        sound = [v for v in values if v is not None and math.isfinite(v)]
        if not sound:
            return None
        spread = statistics.stdev(sound) if len(sound) > 1 else None
        return cls(statistics.fmean(sound), spread, len(sound), len(values))

    @classmethod
    def one(cls, value: float) -> Measured:
        """A number that is no mean."""
        return cls(value, None, 1)


class _Runs(dict[str, "Sequence[Run]"]):
    """Runs by cell; a cell that was not run has an empty sequence."""

    def __missing__(self, cell: str) -> Sequence[Run]:
        return ()


@dataclass(frozen=True)
class Results:
    """The finished runs of a recipe's cells."""

    scale: Scale
    runs: Mapping[str, Sequence[Run]]  # by cell: a run for each of its seeds

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", _Runs(self.runs))

    @property
    def all(self) -> list[Run]:
        """The runs of all cells."""
        return [run for of_cell in self.runs.values() for run in of_cell]

    def final(self, cell: str, measure: str = "test_accuracy") -> Measured | None:
        """A measure of a cell's last evaluation."""
        return Measured.of([run.final(measure) for run in self.runs[cell]])

    def differences(self, cell: str, other: str, measure: str = "test_accuracy") -> list[float]:
        """A cell's last evaluation minus another's, by seed."""
        ends = [(a.final(measure), b.final(measure)) for a, b in self.pairs(cell, other)]
        return [a - b for a, b in ends if a is not None and b is not None]

    def pairs(self, cell: str, other: str) -> list[tuple[Run, Run]]:
        """The runs of two cells that have the same seed."""
        by_seed = {run.manifest["seed"]: run for run in self.runs[other]}
        return [
            (run, by_seed[seed])
            for run in self.runs[cell]
            if (seed := run.manifest["seed"]) in by_seed
        ]

    def late(self, cell: str) -> Measured:
        """The mean test accuracy of the last quarter of the evaluations, and its spread."""
        means = [statistics.fmean(_last_quarter(run)) for run in self.runs[cell]]
        return Measured.of(means) or Measured(math.nan, None, 0)

    def swing(self, cell: str) -> float:
        """The standard deviation of test accuracy in the last quarter of a run, mean over seeds."""
        return statistics.fmean(statistics.pstdev(_last_quarter(run)) for run in self.runs[cell])

    def diverged(self, cell: str) -> int | None:
        """The first round in which a run of the cell diverged, if one did."""
        rounds = [run.num_rounds for run in self.runs[cell] if run.status == "diverged"]
        return min(rounds, default=None)

    def when_diverged(self, cell: str) -> str:
        """In which rounds, and how many, runs of the cell diverged, as text; empty if none did."""
        runs = self.runs[cell]
        ended = sorted(run.num_rounds for run in runs if run.status == "diverged")
        if not ended:
            return ""
        first, last = f"{ended[0]:,}", f"{ended[-1]:,}"
        when = f"round {first}" if first == last else f"rounds {first} to {last}"
        return f"diverged in {when}" + (f" ({len(ended)} of {len(runs)})" if len(runs) > 1 else "")


def _last_quarter(run: Run) -> list[float]:
    """The test accuracies of the last quarter of a run's evaluations, at least one."""
    values = [y for y in run.curve("test_accuracy")[1] if math.isfinite(y)]
    return values[-max(round(len(values) * 0.25), 1) :] or [math.nan]


def late(run: Run, count: int) -> float:
    """The mean test accuracy of the last evaluations, so many."""
    return statistics.fmean(run.curve("test_accuracy")[1][-count:])


def volatility(values: Sequence[float]) -> float:
    """How much a curve changes from one evaluation to the next: root mean square, late.

    That is over the second half of the evaluations, where accuracy rises least.
    """
    late = values[len(values) // 2 :]
    steps = [b - a for a, b in pairwise(late)]
    return math.sqrt(statistics.fmean(x * x for x in steps)) if steps else math.nan


@dataclass(frozen=True)
class Recipe:
    """A table or figure of a paper: what is run for it, and how the results are shown."""

    title: str
    about: str  # what the paper shows, and what is done here, in a few sentences
    captions: Mapping[str, str]  # of its blocks, by their titles; see `page.captioned`
    blocks: Callable[[Results], list[Block]]
    # By name, in the order of the runs; empty if nothing is trained. `weights` may refer to an
    # earlier cell: FROM_CELL and its name.
    cells: Mapping[str, Experiment] = field(default_factory=dict)
    seeds: Sequence[int] = (0,)  # each cell is run with each seed
    ours: bool = False  # whether the paper has no such experiments
    stand_in: str = ""  # a text about replacements for what is not on this machine
    other_data: bool = False  # whether data are replaced, also at the paper's scale
    keeps: Sequence[str] = ()  # columns of rounds for its page that a store would leave out
    of_diverged: str = ""  # text about diverged runs; "": they show earlier evaluations


def with_settings(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with other settings, as key=value, in all of its cells."""
    if not overrides:
        return recipe
    cells = {}
    for cell, experiment in recipe.cells.items():
        tables = experiment.plain()
        for override in overrides:
            apply_override(tables, override)
        cells[cell] = Experiment.of(tables)
    return replace(recipe, cells=cells)
