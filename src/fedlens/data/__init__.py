"""Data sets by name. Each is a function that takes a `Source` and its own options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fedlens.config import names
from fedlens.data.places import Source as Source

if TYPE_CHECKING:
    from fedlens.core.federation import Dataset

DATASETS: Mapping[str, Callable[..., Dataset]] = names.DATASETS
