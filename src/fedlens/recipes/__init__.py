"""The papers' tables and figures: one folder a paper, one file an item.

A recipe is a function of the scale that gives the experiments, the published numbers and how to
show both (`recipe.py`); `reproduce.py` runs it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from fedlens.recipes import fedavg_cifar10, fedns, ghaemi, hsu2020
from fedlens.recipes.recipe import Recipe, Scale

PAPERS: dict[str, Mapping[str, Callable[[Scale], Recipe]]] = {
    "fedavg-cifar10": fedavg_cifar10.ITEMS,
    "hsu2020": hsu2020.ITEMS,
    "fedns": fedns.ITEMS,
    "ghaemi": ghaemi.ITEMS,
}

RECIPES = {
    f"{paper}/{item}": recipe for paper, items in PAPERS.items() for item, recipe in items.items()
}

CHECKOUT = Path(__file__).resolve().parents[3]


def measured(name: str) -> Path | None:
    """The records of a recipe in the checkout that Fedlens is run from, if they are there."""
    place = CHECKOUT / "results" / "papers" / name
    return place if (CHECKOUT / ".git").exists() and place.is_dir() else None
