"""Figure 4: relative accuracy against how unalike clients are, on CIFAR-10 and CIFAR-100."""

from __future__ import annotations

from fedlens.config.experiment import Experiment, Named
from fedlens.recipes.hsu2020.chosen import chosen, chosen_rate
from fedlens.recipes.hsu2020.cifar import (
    CENTRALISED,
    EMD,
    NO_POINT,
    alphas,
    centralised,
    client_emds,
    datasets,
    experiment,
    lasting,
    stand_in,
)
from fedlens.recipes.hsu2020.setting import BASES
from fedlens.recipes.page import beside
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line, Strip, Text
from fedlens.runs.records import Run


def report_goals(scale: Scale) -> tuple[int, ...]:
    return scale.pick((2,), (10,), (5, 10, 20, 40))


def figure4(scale: Scale) -> Recipe:
    cells = {}
    for dataset in datasets(scale):
        cells[f"{dataset}, centralised"] = centralised(scale, dataset)
        for alpha in alphas(scale, dataset):
            for base in BASES:
                for k in report_goals(scale):
                    cells[_cell(scale, dataset, alpha, base, k)] = _tuned(
                        scale, dataset, alpha, base, k
                    )
    return Recipe(
        title="Relative accuracy against EMD",
        about="Accuracy of FedAvg and FedAvgM relative to centralised training, for clients from "
        "alike (left) to one class each (right). The paper takes the best of Figure 8's grid of "
        "learning rates and momenta at every point. Here a pilot picks the point, by images that "
        "are neither trained on nor tested on (hsu2020/figure4-pilot), and the next best where a "
        "run of all rounds diverged at that point; where there was no pilot, it is the paper's "
        "default, 0.01 and 0.9.",
        cells=cells,
        seeds=range(scale.pick(1, 1, 3)),
        blocks=blocks,
        stand_in=stand_in(scale),
        of_diverged=NO_POINT,
    )


def _cell(scale: Scale, dataset: str, alpha: float, base: str, k: int) -> str:
    """The name of a cell. If the pilot picked no momentum for FedAvgM, it is FedAvg's cell."""
    base = "FedAvg" if _is_plain(scale, dataset, alpha, base) else base
    return f"{dataset}, α {alpha:g}, {base}, K {k}"


def _is_plain(scale: Scale, dataset: str, alpha: float, base: str) -> bool:
    """Whether a method has no momentum there: FedAvg, or FedAvgM if the pilot picked none."""
    point = chosen(dataset, alpha, base) if scale.name == "paper" else None
    return base == "FedAvg" if point is None else not point.momentum


def _tuned(scale: Scale, dataset: str, alpha: float, base: str, k: int) -> Experiment:
    """A cell with the pilot's choice of learning rate and momentum, if there is one."""
    if scale.name != "paper" or (point := chosen(dataset, alpha, base)) is None:
        return experiment(scale, dataset, alpha, BASES[base], k)
    algorithm = (Named("fedavgm", {"momentum": point.momentum}),) if point.momentum else ()
    return experiment(scale, dataset, alpha, algorithm, k, lr=point.lr)


def blocks(results: Results) -> list[Block]:
    shown: list[Block] = []
    for dataset in datasets(results.scale):
        runs = {
            a: run for a in alphas(results.scale, dataset) if (run := _any(results, dataset, a))
        }
        if not runs:
            continue
        shown += [
            _curves(results, dataset, {a: run.summary["emd"] for a, run in runs.items()}),
            Strip(
                title=f"{dataset}: how unalike clients are",
                caption="The EMD of each client to the population, a dot a client, by the "
                "concentration α of the Dirichlet prior. The stroke is the mean, weighted by what "
                "clients hold.",
                groups=[(f"α {a:g}", client_emds(run)) for a, run in runs.items()],
                marks=[run.summary["emd"] for run in runs.values()],
                mark="weighted mean",
                x_label="EMD",
            ),
            beside(
                [
                    (f"α {a:g}", EMD[dataset].get(a), Measured(run.summary["emd"], None, 1))
                    for a, run in runs.items()
                ],
                title=f"{dataset}: mean EMD",
                caption="Published: of the splits that the authors released.",
                of="concentration",
                percent=False,
                digits=3,
            ),
            beside(
                [(dataset, CENTRALISED[dataset], results.final(f"{dataset}, centralised"))],
                title=f"{dataset}: centralised accuracy, %",
            ),
        ]
    return [
        *shown,
        Text(
            title="What the paper finds",
            paragraphs=(
                "Accuracy near that of centralised training for alike clients, a substantial drop "
                "between an EMD of 1.7 and 2.0, which FedAvgM makes smaller, and diminishing "
                "returns from more clients a round. The figure's points are not printed.",
                "Which report goals K it has is not printed either: 5, 10, 20 and 40 of 100 "
                "clients are ours, after Hsu et al. (2019).",
            ),
        ),
    ]


def _any(results: Results, dataset: str, alpha: float) -> Run | None:
    """Any run at a concentration, or None: clients are the same in all of them."""
    scale = results.scale
    cells = [_cell(scale, dataset, alpha, b, k) for b in BASES for k in report_goals(scale)]
    return next((run for cell in cells for run in results.runs[cell]), None)


def _curves(results: Results, dataset: str, emds: dict[float, float]) -> Curves:
    whole = results.final(f"{dataset}, centralised")
    lines = []
    for base in BASES:
        for k in report_goals(results.scale):
            cells = {  # without cells of FedAvgM that are FedAvg's
                a: _cell(results.scale, dataset, a, base, k)
                for a in emds
                if base == "FedAvg" or not _is_plain(results.scale, dataset, a, base)
            }
            if not any(results.runs[cell] for cell in cells.values()):
                continue
            found = [lasting(results, cell) for cell in cells.values()]
            y = [f.mean / whole.mean if f and whole and whole.mean else None for f in found]
            ended = [a for a, cell in cells.items() if results.diverged(cell) is not None]
            note = f"diverged at α {', '.join(f'{a:g}' for a in ended)}" if ended else ""
            lines.append(Line(f"{base}, K {k}", [emds[a] for a in cells], y, note=note))
    rate = "the rate that the pilot picked" if chosen_rate(dataset) else "the clients' default rate"
    return Curves(
        title=f"{dataset}: relative accuracy",
        caption="Test accuracy after the last round, divided by that of centralised training, "
        f"which has {rate}. FedAvgM has points only where it has momentum: where the pilot picked "
        "none for it, it is FedAvg, and both are one run. Runs that diverged have no point, "
        "however good they were before: the names of the lines say at which α.",
        lines=lines,
        x_label="mean EMD",
        y_label="relative accuracy",
        percent=True,
        levels=[("centralised", 1.0)],
    )
