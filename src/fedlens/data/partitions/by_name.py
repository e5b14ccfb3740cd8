"""Apply a partition, chosen by name, to examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.config.names import PARTITIONS
from fedlens.config.options import ByName, call, find, resolve
from fedlens.core.federation import Examples


def dealt(
    name: str,
    given: Mapping[str, Any],
    examples: Examples,
    num_classes: int,
    num_clients: int | None,
    rng: np.random.Generator,
    table: ByName = PARTITIONS,
) -> Any:
    """Apply the partition called `name`, from `table` or the user's own code, to examples."""
    function = find(table, name, "partition")
    options = resolve(table.options(name, "partition"), given, f"partition {name!r}")
    if examples.rows is not None and not function.__module__.startswith("fedlens."):
        # A user's function reads `images` directly and expects one image per example.
        examples = replace(examples, images=examples.read(slice(None)), rows=None)
    return call(function, examples, num_classes, num_clients, rng, options=options)
