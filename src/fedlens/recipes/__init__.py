"""The papers' tables and figures: one folder per paper, one file per item.

A recipe is a function of the scale that returns the experiments, the published numbers and how to
show both (`recipe.py`); `reproduce.py` runs it.
"""

import re
from typing import Literal

from fedlens.config.names import RECIPES as RECIPES
from fedlens.config.options import did_you_mean

ScaleName = Literal["smoke", "small", "paper"]


def check_known(name: str) -> None:
    """Raise if there is no such recipe; for the name of a paper, list its recipes."""
    if name not in RECIPES:
        items = [known for known in RECIPES if known.startswith(f"{name.rstrip('/')}/")]
        hint = f"choose from {', '.join(items)}" if items else did_you_mean(name, RECIPES)
        raise ValueError(f"unknown recipe {name!r}: {hint}")


def slug(cell: str) -> str:
    """A cell's name as a folder name."""
    spelled = cell.lower().replace("α", "alpha").replace("λ", "lambda")
    return re.sub(r"[^a-z0-9.]+", "-", spelled).strip("-.")
