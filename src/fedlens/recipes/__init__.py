"""The papers' tables and figures: one folder a paper, one file an item.

A recipe is a function of the scale that gives the experiments, the published numbers and how to
show both (`recipe.py`); `reproduce.py` runs it.
"""

from pathlib import Path
from typing import Literal

from fedlens.names import RECIPES as RECIPES

ScaleName = Literal["smoke", "small", "paper"]

CHECKOUT = Path(__file__).resolve().parents[3]


def measured(name: str) -> Path | None:
    """The records of a recipe in the checkout that Fedlens is run from, if they are there."""
    place = CHECKOUT / "results" / "papers" / name
    return place if (CHECKOUT / ".git").exists() and place.is_dir() else None
