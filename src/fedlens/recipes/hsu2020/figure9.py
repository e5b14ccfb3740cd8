"""Figure 9: learning curves from pretraining and from scratch."""

from __future__ import annotations

from fedlens.recipes.hsu2020 import pretraining
from fedlens.recipes.hsu2020.setting import Method, is_other_data, population, stand_in
from fedlens.recipes.recipe import Recipe, Results, Scale
from fedlens.report.blocks import Block, Curves, Line


def figure9(scale: Scale) -> Recipe:
    clients = population(scale, "geo")
    return Recipe(
        title="Pretrained and from scratch",
        about="Relative accuracy by round, from pretrained weights and from scratch, each relative "
        f"to centralised training from the same start. {pretraining.WITH_FEDVC}",
        cells=pretraining.cells(scale, clients),
        blocks=blocks,
        stand_in=f"{stand_in(clients)} {pretraining.stand_in(scale, clients)}".strip(),
        other_data=is_other_data(clients),
    )


def blocks(results: Results) -> list[Block]:
    return [
        *pretraining.bounds(results),
        *_curves(results),
    ]


def _curves(results: Results) -> list[Curves]:
    return [
        Curves(
            title=f"{start}: relative accuracy",
            caption="Test accuracy divided by that of centralised training from the same start.",
            lines=[
                _line(results, start, method)
                for method in pretraining.METHODS
                if f"{start}, {method.name}" in results.runs
            ],
            y_label="relative accuracy",
            percent=True,
            log_x=True,
            levels=[("centralised", 1.0)],
        )
        for start in pretraining.STARTS
        if f"{start}, centralised" in results.runs
    ]


def _line(results: Results, start: str, method: Method) -> Line:
    whole = results.final(f"{start}, centralised")
    rounds, values = results.runs[f"{start}, {method.name}"][0].curve("test_accuracy")
    best = whole.mean if whole and whole.mean else 1.0
    return Line(method.name, rounds, [value / best for value in values])
