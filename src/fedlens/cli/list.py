"""`fedlens list`."""

from __future__ import annotations

import sys
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
            records = _measured(name, whole=True) if kind == "recipes" else ""
            # An item of a paper is told at the head of its file.
            about = function.__doc__ or sys.modules[function.__module__].__doc__ or ""
            print(f"{called(name, function)}{records}\n    {about.partition(chr(10))[0]}")
        return
    for name in tables if kind is None else tables[kind]:
        print(f"{name}{_measured(name) if kind == 'recipes' else ''}")


def _measured(recipe: str, whole: bool = False) -> str:
    """Where the checkout has records of a recipe, if it has; `whole`: and how much of it."""
    from fedlens.recipes import measured

    place = measured(recipe)
    if place is None:
        return ""
    here = Path.cwd()
    where = place.relative_to(here) if place.is_relative_to(here) else place
    if not (place / "runs").is_dir():
        return f"  measured: {where} (nothing is trained)"
    runs = sum(1 for _ in (place / "runs").iterdir())
    said = f"{runs} run{'s' * (runs != 1)}"
    if whole:
        from fedlens.recipes.stored import coverage

        found, every = coverage(recipe, place)
        said = f"{found} of {every} experiment{'s' * (every != 1)}, {said}"
    return f"  measured: {where} ({said})"
