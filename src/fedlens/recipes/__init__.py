"""The papers' tables and figures: one folder a paper, one file an item.

A recipe is a function of the scale that gives the experiments, the published numbers and how to
show both (`recipe.py`); `reproduce.py` runs it.
"""

import re
from pathlib import Path
from typing import Literal

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


def part(name: str) -> tuple[int, int] | None:
    """How many of a recipe's experiments the checkout has records of, and how many it has.

    By results/README.md, which tests compare with the records: to count them takes torch.
    """
    said = CHECKOUT / "results" / "README.md"
    rows = said.read_text(encoding="utf-8") if said.is_file() else ""
    row = rf"^\|[^|]*`{re.escape(name)}`[^|]*\| (?:all|(\d+) of) (\d+)\b"
    found = re.search(row, rows, re.MULTILINE)
    return None if found is None else (int(found[1] or found[2]), int(found[2]))


def with_other_settings(name: str) -> list[Path]:
    """The records of a recipe's experiments that were run with settings of their own."""
    place = CHECKOUT / "results" / "papers" / name
    others = sorted(place.parent.glob(f"{place.name}-*"))
    return [other for other in others if f"{other.parent.name}/{other.name}" not in RECIPES]
