"""`fedlens list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from fedlens.names import KINDS

Kind = Literal[
    "algorithms",
    "models",
    "partitions",
    "devices",
    "engines",
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
    """Print the names that an experiment can use, and what each is.

    Without a kind: what can be listed.
    """
    if kind is None:
        print("\n".join(KINDS))
        return
    from fedlens.explained import called, choices

    found = choices(KINDS[kind])
    width = max(map(len, found))
    for name, choice in found.items():
        records = _measured(name, whole=long) if kind == "recipes" else ""
        if long:
            print(f"{called(name, choice)}{records}\n    {choice.words}")
        else:
            print(f"{name.ljust(width)}  {choice.words}{records}")


def _measured(recipe: str, whole: bool = False) -> str:
    """The folder with stored results of a recipe, if there is one, and how much it covers.

    With `whole`, complete results also have their counts, and results with other settings are
    listed.
    """
    from fedlens.recipes import measured, part, with_other_settings

    place = measured(recipe)
    if place is None:
        return ""
    if not (place / "runs").is_dir():
        return f"  measured: {_from_here(place)} (nothing is trained)"
    runs = sum(1 for _ in (place / "runs").iterdir())
    known = part(recipe)
    much = [f"{runs} run{'s' * (runs != 1)}"]
    if known and (whole or known.found < known.every):
        experiments = f"experiment{'s' * (known.every != 1)}"
        much.insert(0, f"{known.found} of {known.every} {experiments}")
    if known and known.seeds:
        much.append(f"{known.seeds} seeds")
    if known and known.shorter:
        much.append(f"{known.shorter} experiments with fewer rounds")
    others = [str(_from_here(other)) for other in with_other_settings(recipe)] if whole else []
    also = f"; with other settings: {', '.join(others)}" if others else ""
    return f"  measured: {_from_here(place)} ({', '.join(much)}){also}"


def _from_here(place: Path) -> Path:
    here = Path.cwd()
    return place.relative_to(here) if place.is_relative_to(here) else place
