"""The partitions that only say who holds what, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.core import Examples, Holdings, Split
from fedlens.data.partitions.by_class import classes, shards
from fedlens.data.partitions.by_column import natural, s2
from fedlens.data.partitions.by_dirichlet import dirichlet, dirichlet_per_class
from fedlens.data.partitions.by_file import published
from fedlens.data.partitions.by_round import fresh
from fedlens.data.partitions.by_size import iid, power_law, proportions, quantity_dirichlet
from fedlens.options import call, find, resolve

PLAIN: dict[str, Callable[..., Holdings | Split]] = {
    "iid": iid,
    "proportions": proportions,
    "quantity-dirichlet": quantity_dirichlet,
    "power-law": power_law,
    "shards": shards,
    "classes": classes,
    "dirichlet": dirichlet,
    "dirichlet-per-class": dirichlet_per_class,
    "natural": natural,
    "s2": s2,
    "published": published,
    "fresh": fresh,
}


def dealt_by(
    table: Mapping[str, Callable[..., Any]],
    name: str,
    given: Mapping[str, Any],
    examples: Examples,
    num_classes: int,
    num_clients: int | None,
    rng: np.random.Generator,
) -> Any:
    """What the partition called `name`, from the table or of the user's own, makes of examples."""
    function = find(table, name, "partition")
    options = resolve(function, given, f"partition {name!r}")
    if examples.rows is not None and not function.__module__.startswith("fedlens."):
        # People look at `images`, and expect those of the examples.
        examples = replace(examples, images=examples.read(slice(None)), rows=None)
    return call(function, examples, num_classes, num_clients, rng, options=options)
