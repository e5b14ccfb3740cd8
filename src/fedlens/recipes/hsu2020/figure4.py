"""Figure 4: relative accuracy against how unalike clients are, on CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import itertools

import torch

from fedlens.data.emd import emd_per_client
from fedlens.recipes.hsu2020.cifar import (
    ACCURACY,
    EMD,
    NO_POINT,
    Point,
    alphas,
    at_point,
    centralised,
    chosen,
    chosen_rate,
    datasets,
    experiment,
    relative,
    stand_in,
)
from fedlens.recipes.hsu2020.setting import BASES
from fedlens.recipes.page import beside, note
from fedlens.recipes.recipe import Measured, Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line, Strip
from fedlens.runs.records import Run


def report_goals(scale: Scale) -> tuple[int, ...]:
    return scale.pick((2,), (10,), (5, 10, 20, 40))


def figure4(scale: Scale) -> Recipe:
    cells = {}
    for dataset in datasets(scale):
        cells[f"{dataset}, centralised"] = centralised(scale, dataset)
        for alpha, base, k in itertools.product(alphas(scale, dataset), BASES, report_goals(scale)):
            point = _point(scale, dataset, alpha, base)
            if point is None:
                one = experiment(scale, dataset, alpha, BASES[base], k)
            elif point.momentum:
                one = at_point(scale, dataset, alpha, point, k)
            else:
                one = experiment(scale, dataset, alpha, per_round=k, lr=point.lr)
            cells[_cell(scale, dataset, alpha, base, k)] = one
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


def _point(scale: Scale, dataset: str, alpha: float, base: str) -> Point | None:
    """The learning rate and momentum that the pilot picked, if there was one."""
    return chosen(dataset, alpha, base) if scale.name == "paper" else None


def _is_plain(scale: Scale, dataset: str, alpha: float, base: str) -> bool:
    """Whether a method has no momentum there: FedAvg, or FedAvgM if the pilot picked none."""
    point = _point(scale, dataset, alpha, base)
    return base == "FedAvg" if point is None else not point.momentum


def _cell(scale: Scale, dataset: str, alpha: float, base: str, k: int) -> str:
    """The name of a cell. If the pilot picked no momentum for FedAvgM, it is FedAvg's cell."""
    base = "FedAvg" if _is_plain(scale, dataset, alpha, base) else base
    return f"{dataset}, α {alpha:g}, {base}, K {k}"


def blocks(results: Results) -> list[Block]:
    shown: list[Block] = []
    for dataset in datasets(results.scale):
        runs = {
            a: run for a in alphas(results.scale, dataset) if (run := _any(results, dataset, a))
        }
        if not runs:
            continue
        emds = {a: run.summary["emd"] for a, run in runs.items()}
        shown += [
            _curves(results, dataset, emds),
            Strip(
                title=f"{dataset}: how unalike clients are",
                caption="The EMD of each client to the population, a dot a client, by the "
                "concentration α of the Dirichlet prior. The stroke is the mean, weighted by what "
                "clients hold.",
                groups=[(f"α {a:g}", _client_emds(run)) for a, run in runs.items()],
                marks=[*emds.values()],
                mark="weighted mean",
                x_label="EMD",
            ),
            beside(
                [(f"α {a:g}", EMD[dataset].get(a), Measured.one(emd)) for a, emd in emds.items()],
                title=f"{dataset}: mean EMD",
                caption="Published: of the splits that the authors released.",
                of="concentration",
                percent=False,
                digits=3,
            ),
            beside(
                [(dataset, ACCURACY[dataset], results.final(f"{dataset}, centralised"))],
                title=f"{dataset}: centralised accuracy, %",
            ),
        ]
    return [*shown, note(__name__, "What the paper finds")]


def _client_emds(run: Run) -> list[float]:
    """The EMD of each client from the population."""
    assert run.partition is not None
    found: list[float] = emd_per_client(torch.tensor(run.partition["label_counts"])).tolist()
    return found


def _any(results: Results, dataset: str, alpha: float) -> Run | None:
    """Any run at a concentration, or None: clients are the same in all of them."""
    scale = results.scale
    keys = itertools.product(BASES, report_goals(scale))
    cells = [_cell(scale, dataset, alpha, base, k) for base, k in keys]
    return next((run for cell in cells for run in results.runs[cell]), None)


def _curves(results: Results, dataset: str, emds: dict[float, float]) -> Curves:
    lines = []
    for base, k in itertools.product(BASES, report_goals(results.scale)):
        cells = {  # without cells of FedAvgM that are FedAvg's
            a: _cell(results.scale, dataset, a, base, k)
            for a in emds
            if base == "FedAvg" or not _is_plain(results.scale, dataset, a, base)
        }
        if any(results.runs[cell] for cell in cells.values()):
            y = [relative(results, dataset, cell) for cell in cells.values()]
            ended = [f"{a:g}" for a, cell in cells.items() if results.diverged(cell) is not None]
            ends = f"diverged at α {', '.join(ended)}" if ended else ""
            lines.append(Line(f"{base}, K {k}", [emds[a] for a in cells], y, note=ends))
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
