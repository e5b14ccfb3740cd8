"""`fedlens list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from fedlens.names import ALGORITHMS, DATASETS, DEVICES, MODELS, PARTITIONS, RECIPES, SCHEDULES


def list_command(
    kind: Annotated[
        Literal["algorithms", "models", "partitions", "devices", "datasets", "schedules", "recipes"]
        | None,
        typer.Argument(
            help="algorithms, models, partitions, devices, datasets, schedules or recipes"
        ),
    ] = None,
) -> None:
    """Print the names there are to choose from, one a line; or what can be listed."""
    tables = {
        "algorithms": ALGORITHMS,
        "models": MODELS,
        "partitions": PARTITIONS,
        "devices": DEVICES,
        "losses": LOSSES,
        "optimizers": OPTIMIZERS,
        "datasets": DATASETS,
        "schedules": SCHEDULES,
        "recipes": RECIPES,
    }
    for name in tables if kind is None else tables[kind]:
        print(f"{name}{_measured(name) if kind == 'recipes' else ''}")


def _measured(recipe: str) -> str:
    """Where the checkout has records of a recipe, if it has."""
    from fedlens.recipes import measured

    place = measured(recipe)
    if place is None:
        return ""
    here = Path.cwd()
    return f"  measured: {place.relative_to(here) if place.is_relative_to(here) else place}"
