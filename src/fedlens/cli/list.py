"""`fedlens list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from fedlens.names import (
    ALGORITHMS,
    ANNEALS,
    DATASETS,
    DEVICES,
    LOSSES,
    METRICS,
    MODELS,
    OPTIMIZERS,
    PARTITIONS,
    RECIPES,
    SCHEDULES,
)

Kind = Literal[
    "algorithms",
    "models",
    "partitions",
    "devices",
    "losses",
    "metrics",
    "optimizers",
    "schedules",
    "anneals",
    "datasets",
    "recipes",
]


def list_command(
    kind: Annotated[
        Kind | None,
        typer.Argument(help=f"one of {', '.join(get_args(Kind))}"),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="With options, and what each is.")] = False,
) -> None:
    """Print the names there are to choose from, one a line.

    Without a kind: what can be listed.
    """
    tables = {
        "algorithms": ALGORITHMS,
        "models": MODELS,
        "partitions": PARTITIONS,
        "devices": DEVICES,
        "losses": LOSSES,
        "metrics": METRICS,
        "optimizers": OPTIMIZERS,
        "schedules": SCHEDULES,
        "anneals": ANNEALS,
        "datasets": DATASETS,
        "recipes": RECIPES,
    }
    if long and kind is not None:
        from fedlens.schema import called

        for name, function in tables[kind].items():
            print(f"{called(name, function)}\n    {(function.__doc__ or '').splitlines()[0]}")
        return
    for name in tables if kind is None else tables[kind]:
        print(f"{name}{_measured(name) if kind == 'recipes' else ''}")


def _measured(recipe: str) -> str:
    """Where the checkout has records of a recipe, if it has."""
    from fedlens.recipes import measured

    place = measured(recipe)
    if place is None:
        return ""
    here, runs = Path.cwd(), sum(1 for _ in (place / "runs").iterdir())
    where = place.relative_to(here) if place.is_relative_to(here) else place
    return f"  measured: {where} ({runs} run{'s' * (runs != 1)})"
