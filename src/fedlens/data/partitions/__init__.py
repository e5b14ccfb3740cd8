"""Partitions: who holds which examples.

A partition gives every example an owner, or none. Each takes the time of a sort, never draws
again until something fits, and works for any distribution of the classes. The examples of a
client stand in their stored order, whatever the order in which they were dealt. `fresh` is a
split that is dealt anew in every round; `noisy-labels` and `shifted` change what is dealt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.core import Examples, Holdings, Split
from fedlens.data.partitions.altered import Altered, noisy_labels, shifted
from fedlens.data.partitions.by_class import classes, shards
from fedlens.data.partitions.by_column import natural, s2
from fedlens.data.partitions.by_dirichlet import dirichlet, dirichlet_per_class
from fedlens.data.partitions.by_file import published
from fedlens.data.partitions.by_round import fresh
from fedlens.data.partitions.by_size import iid, power_law, proportions, quantity_dirichlet
from fedlens.options import call, find, resolve

PARTITIONS: dict[str, Callable[..., Holdings | Split | Altered]] = {
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
    "noisy-labels": noisy_labels,
    "shifted": shifted,
}


def dealt(
    name: str,
    given: Mapping[str, Any],
    examples: Examples,
    num_classes: int,
    num_clients: int | None,
    rng: np.random.Generator,
) -> Any:
    """What a partition by name makes of examples; one of the user's own may give anything."""
    function = find(PARTITIONS, name, "partition")
    options = resolve(function, given, f"partition {name!r}")
    if examples.rows is not None and not function.__module__.startswith("fedlens."):
        # People look at `images`, and expect those of the examples.
        examples = replace(examples, images=examples.read(slice(None)), rows=None)
    return call(function, examples, num_classes, num_clients, rng, options=options)


def finds_clients(name: Any, options: Mapping[str, Any]) -> bool:
    """Whether a partition finds its clients in the data: nobody chooses how many there are."""
    of = options.get("of")
    if isinstance(of, Mapping):
        return finds_clients(of.get("name"), of)
    return (of or name) in ("natural", "published", "s2")


__all__ = ["PARTITIONS", "Altered", "dealt", "finds_clients"]
