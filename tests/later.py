"""Modules that are imported when they are first used.

Every process that runs tests imports the files of all, and few of them need the largest libraries.
"""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Later:
    module: str

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.module), name)
