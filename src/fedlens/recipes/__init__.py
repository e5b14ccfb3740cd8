"""The papers' tables and figures: one folder a paper, one file an item.

A recipe is a function of the scale that gives the experiments, the published numbers and how to
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
    """See that there is such a recipe; of a paper's name alone, say which it has."""
    if name not in RECIPES:
        items = [known for known in RECIPES if known.startswith(f"{name.rstrip('/')}/")]
        hint = f"choose from {', '.join(items)}" if items else did_you_mean(name, RECIPES)
        raise ValueError(f"unknown recipe {name!r}: {hint}")


def measured(name: str) -> Path | None:
    """The records of a recipe in the checkout that Fedlens is run from, if they are there."""
    place = CHECKOUT / "results" / "papers" / name
    return place if (CHECKOUT / ".git").exists() and place.is_dir() else None


class Part(NamedTuple):
    """How much of a recipe there are records of."""

    found: int  # of its experiments
    every: int
    seeds: str = ""  # "1 of 3", where they are fewer than its own
    shorter: str = ""  # how many experiments end before their rounds, in a word, where some do


def part(name: str) -> Part | None:
    """How much of a recipe the checkout has records of, where that is said.

    By results/README.md, which tests compare with the records: to count them takes torch.
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
    """The records of a recipe's experiments that were run with settings of their own."""
    place = CHECKOUT / "results" / "papers" / name
    others = sorted(place.parent.glob(f"{place.name}-*"))
    return [other for other in others if f"{other.parent.name}/{other.name}" not in RECIPES]
