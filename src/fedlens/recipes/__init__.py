"""The papers' tables and figures: one folder per paper, one file per item.

A recipe is a function of the scale that returns the experiments, the published numbers and how to
show both (`recipe.py`); `reproduce.py` runs it.
"""

import re
from pathlib import Path
from typing import Literal, NamedTuple

from fedlens.names import RECIPES as RECIPES
from fedlens.options import did_you_mean

ScaleName = Literal["smoke", "small", "paper"]

CHECKOUT = Path(__file__).resolve().parents[3]


def check_known(name: str) -> None:
    """Raise if there is no such recipe; for the name of a paper, list its recipes."""
    if name not in RECIPES:
        items = [known for known in RECIPES if known.startswith(f"{name.rstrip('/')}/")]
        hint = f"choose from {', '.join(items)}" if items else did_you_mean(name, RECIPES)
        raise ValueError(f"unknown recipe {name!r}: {hint}")


def measured(name: str) -> Path | None:
    """The stored records of a recipe, if Fedlens runs from a checkout that has them."""
    place = CHECKOUT / "results" / "papers" / name
    return place if (CHECKOUT / ".git").exists() and place.is_dir() else None


class Part(NamedTuple):
    """How much of a recipe has stored records."""

    found: int  # experiments with records
    every: int
    seeds: str = ""  # "1 of 3", if there are fewer than the recipe has
    shorter: str = ""  # how many experiments end before their rounds, as a word, if any


def part(name: str) -> Part | None:
    """How much of a recipe the checkout has records of, if results/README.md lists it.

    That file is read because counting records needs torch; tests compare it with the records.
    """
    said = CHECKOUT / "results" / "README.md"
    rows = said.read_text(encoding="utf-8") if said.is_file() else ""
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    for item, experiments, *more in (cells for cells in table if len(cells) > 1):
        found = re.match(r"(?:all|(\d+) of) (\d+)\b", experiments)
        if found and f"`{name}`" in item:
            few = re.match(r"\d+ of \d+", more[1]) if len(more) > 1 else None
            shorter = re.search(r"(\w+) end after", experiments)
            return Part(
                int(found[1] or found[2]),
                int(found[2]),
                few[0] if few else "",
                shorter[1].lower() if shorter else "",
            )
    return None


def with_other_settings(name: str) -> list[Path]:
    """The stored records of a recipe that were run with other settings, one folder each."""
    place = CHECKOUT / "results" / "papers" / name
    others = sorted(place.parent.glob(f"{place.name}-*"))
    return [other for other in others if f"{other.parent.name}/{other.name}" not in RECIPES]
