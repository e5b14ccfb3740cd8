"""Replaces packages that pfl imports only for privacy accounting, on a machine without them.

python -c "import absent" is enough, before any import of pfl: nothing of them is called here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

UNUSED = ("scipy", "dp_accounting", "prv_accountant", "multiprocess", "attr", "absl", "dill")


class Nothing(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        unused = name.partition(".")[0] in UNUSED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if unused else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


missing = [name for name in UNUSED if importlib.util.find_spec(name) is None]
if missing:
    sys.meta_path.append(Finder())


def _share_one_gpu() -> None:
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda **others: begin(**others | {"backend": "gloo"})
    torch.cuda.set_device = lambda *_: None


if "WORLD_SIZE" in os.environ and torch.cuda.is_available():
    _share_one_gpu()
