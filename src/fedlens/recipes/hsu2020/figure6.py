"""Figure 6: learning with virtual clients, and accuracy against EMD over partitionings."""

from __future__ import annotations

from fedlens.experiment import Experiment, Named
from fedlens.recipes.hsu2020 import table2
from fedlens.recipes.hsu2020.setting import (
    BASES,
    NAMES,
    Population,
    experiment,
    population,
    rounds,
    stand_in,
    virtual,
)
from fedlens.recipes.page import curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line

GEO = ("iNaturalist-Geo-30k", "iNaturalist-Geo-3k", "iNaturalist-Geo-1k", "iNaturalist-Geo-100")
ALPHAS = (100.0, 1.0, 0.3, 0.1)  # of the partitionings that stand in for those


def partitionings(scale: Scale) -> dict[str, Population]:
    """Populations from alike to unalike clients."""
    geo = population(scale, "geo")
    if geo.is_stand_in:
        spread = {"min_size": 16}
        return {
            f"α {alpha:g}": Population(
                geo.name,
                geo.used,
                geo.dataset,
                geo.model,
                Named("dirichlet-per-class", {"alpha": alpha, **spread}),
                geo.count,
            )
            for alpha in ALPHAS
        }
    return {
        name: Population(
            name, name, Named(name.lower(), {"size": 299}), geo.model, augment=geo.augment
        )
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
        "(the runs of Table 2), and accuracy at 2.5k rounds against the mean EMD of several "
        "partitionings.",
        cells=table2.cells(scale) | by_emd,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(population(scale, "geo"), population(scale, "user")),
    )


def blocks(results: Results) -> list[Block]:
    shown: list[Block] = [
        curves(
            results,
            {
                cell: cell.removeprefix(f"{which}, ")
                for cell in table2.PUBLISHED
                if cell.startswith(f"{which}, ")
            },
            title=f"{NAMES[which]}: test accuracy",
            caption="Accuracy on the test images, with and without virtual clients.",
            y_label="test accuracy",
        )
        for which in table2.POPULATIONS
    ]
    return [*shown, _by_emd(results)]


def _by_emd(results: Results) -> Curves:
    lines = []
    names = list(partitionings(results.scale))
    for base in BASES:
        points = []
        for name in names:
            cell = f"{name}, {base}, FedVC"
            found = results.final(cell)
            emd = results.runs[cell][0].summary["emd"]
            points.append((emd, found.mean if found else None))
        points.sort()
        lines.append(Line(f"{base}, FedVC", [x for x, _ in points], [y for _, y in points]))
    return Curves(
        title="Accuracy against EMD",
        caption="Test accuracy at the middle budget of rounds, by the mean EMD of the "
        "partitioning: clients are less alike to the right.",
        lines=lines,
        x_label="mean EMD",
        y_label="test accuracy",
        percent=True,
    )
