"""What the tables and figures of Hsu, Qi and Brown (2020) share: populations and methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.data.augment import Augment
from fedlens.recipes import page
from fedlens.recipes.page import mean_of, published, sentences
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Curves, Line, Table
from fedlens.runs.records import at_batches, at_rounds

Which = Literal["geo", "user", "landmarks"]
NAMES: dict[Which, str] = {
    "geo": "iNaturalist-Geo-3k",
    "user": "iNaturalist-User-120k",
    "landmarks": "Landmarks-User-160k",
}
PUBLISHED = published(__name__)
EMD = PUBLISHED["emd"]
BASES: dict[str, tuple[Named, ...]] = {
    "FedAvg": (),
    "FedAvgM": (Named("fedavgm", {"momentum": 0.9}),),
}
Budget = Literal["rounds", "batches"]
BUDGETS: dict[Budget, tuple[str, ...]] = {  # at which the paper reports
    "rounds": ("1k", "2.5k", "5k"),
    "batches": ("10k", "25k", "50k"),
}
GOALS = (10, 50, 100)  # report goals: clients per round
STEPS = 4  # of a virtual client: 256 examples in batches of 64
EPOCHS = 50  # of centralised training at the paper's scale
OUR_EPOCHS = sentences(__name__, "Centralised training")  # says that number


class Method(NamedTuple):
    """A method in a table of the paper."""

    base: str  # of BASES
    vc: bool = False  # with FedVC
    ir: bool = False  # with FedIR
    goal: int = 0  # the paper's report goal, where a table has several; else it is 10

    def cell(self, first: str = "") -> str:
        """The name of its cell, after the clients, the layers or the start."""
        parts = {"FedVC": self.vc, "FedIR": self.ir, f"K {self.goal}": self.goal}
        words = [first, self.base, *(part for part, has in parts.items() if has)]
        return ", ".join(filter(None, words))

    def says(self, column: str, scale: Scale) -> str:
        """What a table has of it in a column."""
        if column == "method":
            return self.base
        if column == "K":
            here = goal(scale, self.goal)
            return str(here) if here == self.goal else f"{self.goal} ({here} here)"
        return "yes" if {"FedVC": self.vc, "FedIR": self.ir}[column] else "no"


Key = tuple[str, Method]
"""A cell: the first words of its name, and its method."""


@dataclass(frozen=True)
class Population:
    """Clients of the paper, or their replacements, and what they train."""

    name: str  # in the paper
    used: str  # the one used here
    plain: Experiment  # of their data and model, without rounds and a method

    @property
    def is_stand_in(self) -> bool:
        return self.name != self.used

    @property
    def called(self) -> str:
        """The paper's name, and the replacement used here if there is one."""
        return f"{self.name} (here: {self.used})" if self.is_stand_in else self.name

    def dealt(self, partition: Named) -> Population:
        """The same with another partition."""
        clients = replace(self.plain.clients, partition=partition)
        return replace(self, plain=replace(self.plain, clients=clients))


def population(scale: Scale, which: Which) -> Population:
    """The paper's population, else FEMNIST by writer (users) or imbalanced CIFAR-10 (places)."""
    name = NAMES[which]
    if scale.name == "paper" and scale.has(name.lower()):
        weights = scale.weights("mobilenet_v2")
        size, bottleneck = (224, {"bottleneck": 64}) if which == "landmarks" else (299, {})
        plain = Experiment(
            Named(name.lower(), {"size": size}),
            Named("mobilenetv2", bottleneck if weights else {"norm": "group", **bottleneck}),
            rounds=1,
            augment=Augment(resized=0.08, flip=True),
            weights=weights,
            # Frozen layers have statistics of ImageNet, so images need ImageNet's normalisation.
            norm="frozen" if weights else "shared",
            normalise="imagenet" if weights else "dataset",
        )
        return Population(name, name, plain)
    used = scale.dataset("cifar10" if which == "geo" else "femnist")
    if used == "femnist":
        model = scale.pick(Named("linear"), Named("lenet5"), Named("mcmahan-cnn"))
        return Population(name, "FEMNIST by writer", Experiment(Named(used), model, rounds=1))
    model = scale.pick(Named("linear"), Named("simple-cnn"), Named("hsu-cnn"))
    words = "imbalanced CIFAR-10" if used == "cifar10" else "imbalanced embedded images"
    clients = Clients(count=scale.pick(20, 50, 135), partition=imbalanced(0.3))
    return Population(name, words, Experiment(Named(used), model, rounds=1, clients=clients))


def imbalanced(alpha: float) -> Named:
    return Named("dirichlet-per-class", {"alpha": alpha, "min_size": 16})


GEO = ("iNaturalist-Geo-30k", "iNaturalist-Geo-3k", "iNaturalist-Geo-1k", "iNaturalist-Geo-100")
ALPHAS = (100.0, 1.0, 0.3, 0.1)  # of the partitions that replace the ones in `GEO`


def partitionings(scale: Scale) -> dict[str, Population]:
    """Populations, from similar to dissimilar clients."""
    geo = population(scale, "geo")
    if geo.is_stand_in:
        return {f"α {alpha:g}": geo.dealt(imbalanced(alpha)) for alpha in ALPHAS}
    return {
        name: Population(name, name, replace(geo.plain, dataset=Named(name.lower(), {"size": 299})))
        for name in GEO
        if scale.has(name.lower())
    }


def stand_in(*populations: Population) -> str:
    """A text about what replaces the paper's populations."""
    words = [
        f"In the place of {one.name}: {one.used}, with {one.plain.model.name} in that of "
        "MobileNetV2."
        for one in populations
        if one.is_stand_in
    ]
    sections = ["On other data"] if words else []
    weights = [one.plain.weights for one in populations if not one.is_stand_in]
    if weights:
        sections += ["With weights" if weights[0] else "Without weights", "Square images"]
    return " ".join([*words, sentences(__name__, *sections)]).strip()


def is_other_data(*populations: Population) -> bool:
    """Whether other data replace some of the paper's populations."""
    return any(one.is_stand_in for one in populations)


def rounds(scale: Scale) -> tuple[int, int, int]:
    """The numbers of rounds used for the paper's 1k, 2.5k and 5k."""
    return scale.pick((1, 2, 3), (8, 20, 40), (1000, 2500, 5000))


def batches(scale: Scale) -> tuple[int, int, int]:
    """The numbers of batches used for the paper's 10k, 25k and 50k."""
    return scale.pick((4, 8, 12), (80, 200, 400), (10_000, 25_000, 50_000))


def schedule(scale: Scale, last: int) -> Evaluate:
    """When a run is evaluated: at every budget, and often enough to know a round to within 2%.

    Table 5 counts rounds from 60 to 39,236, and a batch budget may end in any round.
    """
    virtual_rounds = [budget // STEPS for budget in batches(scale)]
    at = {budget for budget in (*rounds(scale), *virtual_rounds) if budget <= last}
    if scale.name == "paper":
        at |= {round(1.02**power) for power in range(int(math.log(last, 1.02)) + 1)}
    return Evaluate(every=scale.pick(1, 4, 100), at=tuple(sorted(at)))


def goal(scale: Scale, paper: int) -> int:
    """The report goal used for one of the paper's."""
    at = GOALS.index(paper)
    return scale.pick((2, 3, 4), (5, 10, 20), GOALS)[at]


def goals(scale: Scale, *paper: int) -> tuple[int, ...]:
    """Which of the paper's report goals are run: the largest of three only at `paper` scale."""
    return paper if scale.name == "paper" or len(paper) < 3 else paper[:-1]


def experiment(
    scale: Scale,
    clients: Population,
    method: Method,
    *,
    last: int | None = None,
    layers: int | None = None,
) -> Experiment:
    """One run of `last` rounds; with `layers`, only that many last layers are trained."""
    batch_size, epochs = scale.pick(16, 32, 64), 1
    virtual = Named("fedvc", {"size": STEPS * batch_size})  # four steps, as in the paper
    added = [*[virtual] * method.vc, *[Named("fedir")] * method.ir]
    if clients.name == NAMES["landmarks"]:
        batch_size, epochs = scale.pick((16, 1), (32, 2), (32, 5))
    last = last or rounds(scale)[-1]
    return replace(
        clients.plain,
        rounds=last,
        engine=scale.engine,
        train=scale.pick(1, layers, layers) if layers else "all",  # a linear model has one layer
        clients=replace(clients.plain.clients, per_round=goal(scale, method.goal or 10)),
        local=LocalTraining(
            epochs=epochs,
            batch_size=batch_size,
            lr=scale.pick(0.05, 0.05, 0.01) if clients.is_stand_in else 0.01,
            weight_decay=4e-5,
        ),
        evaluate=schedule(scale, last),
        algorithm=(*added, *BASES[method.base]),
    )


def centralised(scale: Scale, clients: Population, layers: int | None = None) -> Experiment:
    """The upper bound: one client with all examples; a round is an epoch."""
    last = scale.pick(1, 5, EPOCHS)
    alone = experiment(scale, clients, Method("FedAvg"), layers=layers, last=last)
    return replace(
        alone,
        clients=Clients(count=1, partition=Named("iid")),
        local=replace(alone.local, epochs=1, reset=False),
        evaluate=Evaluate(every=1),
    )


def recipe(
    scale: Scale, clients: Sequence[Which], item: str, *, more: str = "", **parts: Any
) -> Recipe:
    """The recipe of an item about these clients; `more` is added to what stands in for them."""
    who = {which: population(scale, which) for which in clients}
    called: dict[str, str] = {which: one.called for which, one in who.items()}
    parts |= {"also": [stand_in(*who.values()), more], "other_data": is_other_data(*who.values())}
    return page.recipe(__name__, scale, item, values={"epochs": OUR_EPOCHS, **called}, **parts)


def relative_curves(lines: Sequence[Line], **more: Any) -> Curves:
    """Accuracies divided by that of centralised training."""
    levels = [("centralised", 1.0)]
    return Curves(lines=lines, y_label="relative accuracy", percent=True, levels=levels, **more)


def at_budgets(
    results: Results,
    rows: Iterable[Key],
    theirs: Mapping[str, Sequence[float]] = {},
    *,
    of: Sequence[str],
    by: Budget = "rounds",
    called: Mapping[Any, str] = {},
    about: str = "",
) -> Table:
    """Accuracy at fixed numbers of rounds or batches, ours beside `theirs` by cell, in percent.

    A row begins with the columns `of`. That of `clients` is what the first words of its cell are
    `called`, the others say what its method is. `about` ends the title.
    """
    scale, header = results.scale, list(of)
    budgets = rounds(scale) if by == "rounds" else batches(scale)
    for name, budget in zip(BUDGETS[by], budgets, strict=True):
        header += [f"published @{name}", f"ours @{budget:,}"] if theirs else [f"@{budget:,}"]
    body: list[list[str]] = []
    fewer: dict[str, None] = {}  # means over fewer runs than there are, as "2 of 3"
    for first, method in rows:
        cell = method.cell(first)
        body.append([called[first] if c == "clients" else method.says(c, scale) for c in of])
        for place, budget in enumerate(budgets):
            mean = at_budget(results, cell, budget, by)
            number = mean_of(mean, 1)
            if mean is not None and mean.seeds < mean.runs:
                fewer[some := f"{mean.seeds} of {mean.runs}"] = None
                number += f" ({some})"
            body[-1] += [f"{theirs[cell][place]:.1f}", number] if theirs else [number]
    return Table(
        title=f"Accuracy at {by}{about}",
        caption=f"{', '.join(fewer)}: this many of the runs got that far." if fewer else "",
        header=header,
        rows=body,
        published=frozenset(range(len(of), len(header), 2) if theirs else ()),
    )


def at_budget(results: Results, cell: str, budget: int, by: Budget = "rounds") -> Measured | None:
    """The test accuracy of a cell at a number of rounds or batches."""
    find = at_rounds if by == "rounds" else at_batches
    return Measured.of([find(run.rounds, [budget])[budget] for run in results.runs[cell]])
