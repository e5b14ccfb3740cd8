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
    """Where the checkout has records of a recipe, if it has, and of which part of it.

    With `whole` how much is said of all, and which records there are with other settings.
    """
    from fedlens.recipes import measured, part, with_other_settings

    place = measured(recipe)
    if place is None:
        return ""
    if not (place / "runs").is_dir():
        return f"  measured: {_from_here(place)} (nothing is trained)"
    runs, share = sum(1 for _ in (place / "runs").iterdir()), part(recipe)
    others = []
    if whole:
        from fedlens.recipes.stored import coverage

        found, every = coverage(recipe, place)
        share = f"{found} of {every}"
        others = [str(_from_here(other)) for other in with_other_settings(recipe)]
    experiments = f"{share} experiment{'s' * (not share.endswith(' 1'))}, " if share else ""
    also = f"; with other settings: {', '.join(others)}" if others else ""
    return f"  measured: {_from_here(place)} ({experiments}{runs} run{'s' * (runs != 1)}){also}"


def _from_here(place: Path) -> Path:
    here = Path.cwd()
    return place.relative_to(here) if place.is_relative_to(here) else place
