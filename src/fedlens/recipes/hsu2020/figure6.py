"""Figure 6: learning with virtual clients, and accuracy against EMD over partitionings."""

from __future__ import annotations

from dataclasses import replace

from fedlens.config.experiment import Experiment, Named
from fedlens.recipes.hsu2020 import table2
from fedlens.recipes.hsu2020.setting import (
    BASES,
    EMD,
    NAMES,
    OUR_EPOCHS,
    Population,
    at_budget,
    experiment,
    is_other_data,
    population,
    rounds,
    stand_in,
    virtual,
)
from fedlens.recipes.page import beside, curves
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line, Table

GEO = ("iNaturalist-Geo-30k", "iNaturalist-Geo-3k", "iNaturalist-Geo-1k", "iNaturalist-Geo-100")
ALPHAS = (100.0, 1.0, 0.3, 0.1)  # of the partitions that replace the ones in `GEO`


def partitionings(scale: Scale) -> dict[str, Population]:
    """Populations, from similar to dissimilar clients."""
    geo = population(scale, "geo")
    if geo.is_stand_in:
        spread = {"min_size": 16}
        return {
            f"α {alpha:g}": replace(
                geo, partition=Named("dirichlet-per-class", {"alpha": alpha, **spread})
            )
            for alpha in ALPHAS
        }
    return {
        name: replace(geo, name=name, used=name, dataset=Named(name.lower(), {"size": 299}))
        for name in GEO
        if scale.has(name.lower())
    }


def figure6(scale: Scale) -> Recipe:
    by_emd: dict[str, Experiment] = {
        f"{name}, {base}, FedVC": experiment(
            scale, clients, (virtual(scale), *algorithm), 10, last=rounds(scale)[1]
        )
        for name, clients in partitionings(scale).items()
        for base, algorithm in BASES.items()
    }
    return Recipe(
        title="Virtual clients",
        about="Curves of FedAvg and FedAvgM with and without FedVC on two imbalanced populations "
        "(the runs of Table 2), and relative accuracy at 2.5k rounds against the mean EMD of "
        "several partitionings and of the users, with virtual clients. "
        f"{OUR_EPOCHS}",
        cells=table2.cells(scale) | table2.bounds(scale) | by_emd,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(population(scale, "geo"), population(scale, "user")),
        other_data=is_other_data(population(scale, "geo"), population(scale, "user")),
    )


def blocks(results: Results) -> list[Block]:
    shown: list[Block] = [
        curves(
            results,
            {
                f"{which}, {method.name}": method.name
                for clients, method in table2.PUBLISHED
                if clients == which
            },
            title=f"{population(results.scale, which).used}: test accuracy",
            caption="Accuracy on the test images, with and without virtual clients.",
            y_label="test accuracy",
        )
        for which in table2.POPULATIONS
    ]
    return [*shown, _by_emd(results), _emds(results)]


def _places(results: Results) -> dict[str, tuple[str, str]]:
    """By partitioning: the prefix of its cells' names, and its cell of centralised training."""
    found = {name: (name, "geo, centralised") for name in partitionings(results.scale)}
    return found | {NAMES["user"]: ("user", "user, centralised")}


def _by_emd(results: Results) -> Curves:
    budget = rounds(results.scale)[1]
    lines: list[Line] = []
    places: list[str] = []
    for base in BASES:
        points: list[tuple[float, float | None, str]] = []
        for place, (first, whole) in _places(results).items():
            cell = f"{first}, {base}, FedVC"
            found, best = at_budget(results, cell, budget), results.final(whole)
            relative = found.mean / best.mean if found and best and best.mean else None
            if runs := results.runs[cell]:
                points.append((runs[0].summary["emd"], relative, place))
        points.sort(key=lambda point: point[0])
        places = [place for _, _, place in points] or places
        lines.append(Line(f"{base}, FedVC", [x for x, _, _ in points], [y for _, y, _ in points]))
    return Curves(
        title="Relative accuracy against EMD",
        caption=f"Test accuracy at {budget:,} rounds, divided by that of centralised training on "
        "the same images, by the mean EMD of the partitioning: clients are less alike to the "
        f"right. From left to right: {', '.join(places)}.",
        lines=lines,
        x_label="mean EMD",
        y_label="relative accuracy",
        percent=True,
        levels=[("centralised", 1.0)],
    )


def _emds(results: Results) -> Table:
    base = next(iter(BASES))
    return beside(
        [
            (
                place,
                EMD.get(place),
                Measured.of(
                    [run.summary["emd"] for run in results.runs[f"{first}, {base}, FedVC"]][:1]
                ),
            )
            for place, (first, _) in _places(results).items()
        ],
        title="Mean EMD",
        caption="The paper prints that of the users.",
        of="partitioning",
        percent=False,
        digits=2,
        compared=not population(results.scale, "user").is_stand_in,
    )
