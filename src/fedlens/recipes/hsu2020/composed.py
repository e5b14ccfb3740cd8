"""Beyond the paper: FedVC, FedIR and both, with FedAvg and with FedAvgM, on both populations."""

from __future__ import annotations

from fedlens.config.experiment import Experiment, Named
from fedlens.recipes.hsu2020.setting import (
    BASES,
    OUR_EPOCHS,
    Row,
    Which,
    at_budgets,
    centralised,
    experiment,
    is_other_data,
    population,
    stand_in,
    virtual,
)
from fedlens.recipes.page import ahead, beside, curves
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block

POPULATIONS: tuple[Which, ...] = ("geo", "user")
ADDED = ("", ", FedVC", ", FedIR", ", FedVC, FedIR")  # added to FedAvg or FedAvgM


def cells(scale: Scale) -> dict[str, Experiment]:
    found = {}
    for which in POPULATIONS:
        clients = population(scale, which)
        for base, algorithm in BASES.items():
            for added in ADDED:
                drawn = (virtual(scale),) if "FedVC" in added else ()
                reweighted = (Named("fedir"),) if "FedIR" in added else ()
                found[f"{which}, {base}{added}"] = experiment(
                    scale, clients, (*drawn, *reweighted, *algorithm), 10
                )
    return found


def composed(scale: Scale) -> Recipe:
    bounds = {
        f"{which}, centralised": centralised(scale, population(scale, which))
        for which in POPULATIONS
    }
    return Recipe(
        title="FedVC, FedIR and both",
        about="The paper has FedVC without FedIR on two populations (Table 2), and FedIR with "
        "FedVC on one of them (Table 3). Here each is added to FedAvg and to FedAvgM by itself, "
        "and both together, K = 10, with the same seeds: so what each brings is seen. "
        "Runs called geo have places for clients, those called user people, or what stands in for "
        f"them. {OUR_EPOCHS}",
        cells=cells(scale) | bounds,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        ours=True,
        stand_in=stand_in(*(population(scale, which) for which in POPULATIONS)),
        other_data=is_other_data(*(population(scale, which) for which in POPULATIONS)),
    )


def blocks(results: Results) -> list[Block]:
    names = {which: population(results.scale, which).used for which in POPULATIONS}
    gains = [
        (f"{which}, {base}{added}", f"{which}, {base}")
        for which in POPULATIONS
        for base in BASES
        for added in ADDED
        if added
    ]
    rows: list[Row] = [
        (
            (
                names[which],
                base,
                "yes" if "FedVC" in added else "no",
                "yes" if "FedIR" in added else "no",
            ),
            f"{which}, {base}{added}",
            (),
        )
        for which in POPULATIONS
        for base in BASES
        for added in ADDED
    ]
    of = ("clients", "method", "FedVC", "FedIR")
    return [
        ahead(results, gains, title="What each brings, after the last round"),
        at_budgets(results, rows, of=of, title="Accuracy at rounds"),
        at_budgets(
            results,
            rows,
            of=of,
            title="Accuracy at batches",
            by="batch",
            caption="Test accuracy in %, when each round's largest client has taken this many "
            "batches in all. – stands where a run had not spent as many.",
        ),
        beside(
            [(names[which], None, results.final(f"{which}, centralised")) for which in POPULATIONS],
            title="Centralised, %",
            of="clients",
        ),
        *(
            curves(
                results,
                {
                    cell: f"{base}{added}"
                    for base in BASES
                    for added in ADDED
                    if (cell := f"{which}, {base}{added}") in results.runs
                },
                title=f"{names[which]}: test accuracy by round",
                caption="Accuracy on the test images.",
                y_label="test accuracy",
            )
            for which in POPULATIONS
        ),
    ]
