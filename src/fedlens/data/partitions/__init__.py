"""Partitions: who holds which examples.

A partition gives every example an owner, or none. Each takes the time of a sort, never draws
again until something fits, and works for any distribution of the classes. The examples of a
client stand in their stored order, whatever the order in which they were dealt. `fresh` is a
split that is dealt anew in every round; `noisy-labels` and `shifted` change what is dealt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedlens.core import Examples, Holdings, Split
from fedlens.data.partitions.altered import Altered, noisy_labels, shifted
from fedlens.data.partitions.plain import PLAIN, dealt_by

PARTITIONS: dict[str, Callable[..., Holdings | Split | Altered]] = {
    **PLAIN,
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
    return dealt_by(PARTITIONS, name, given, examples, num_classes, num_clients, rng)


def finds_clients(name: Any, options: Mapping[str, Any]) -> bool:
    """Whether a partition finds its clients in the data: nobody chooses how many there are."""
    of = options.get("of")
    if isinstance(of, Mapping):
        return finds_clients(of.get("name"), of)
    return (of or name) in ("natural", "published", "s2")


__all__ = ["PARTITIONS", "Altered", "dealt", "finds_clients"]
