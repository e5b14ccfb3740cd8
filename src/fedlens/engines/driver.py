"""What a worker of a cluster needs from its driver process: the same versions, and user code.

The user's own modules lie beside an experiment, and other machines may not have them. So they are
sent as source text, and a worker imports the same modules as its driver. (A `runtime_env` of Ray
sends files only when a process connects to the cluster, and these modules may be imported later.)
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import numpy as np
import torch

from fedlens.config.own_code import is_own
from fedlens.version import __version__


class Source(NamedTuple):
    """The source of a module, as it is sent."""

    text: str
    file: str  # its path on the driver's machine
    is_package: bool


class Driver(NamedTuple):
    versions: dict[str, str]
    modules: dict[str, Source]  # the user's own modules, by name

    @classmethod
    def here(cls) -> Driver:
        return cls(_versions(), _own_modules())

    def set_up_worker(self) -> str:
        """Make a worker like its driver; return one line that says why it fails, or ""."""
        mine = _versions()
        for name, version in self.versions.items():
            if mine.get(name) != version:
                return (
                    f"{platform.node()} has {name} {mine.get(name)}, not {version}: "
                    "install the same on every node"
                )
        sys.meta_path.insert(0, _SentCode(self.modules))
        return ""


def _versions() -> dict[str, str]:
    """The versions that results depend on; builds of one version for other devices are equal."""
    found = {"fedlens": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {name: str(version).partition("+")[0] for name, version in found.items()}


def _own_modules() -> dict[str, Source]:
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in ("__main__", "__mp_main__") or not isinstance(file, str):
            continue
        path = Path(file)
        if path.suffix == ".py" and is_own(path):
            text = importlib.util.decode_source(path.read_bytes())
            found[name] = Source(text, str(path), hasattr(module, "__path__"))
    return found


class _SentCode(MetaPathFinder, InspectLoader):
    """Imports modules from the source that was sent, before the files of this machine."""

    def __init__(self, modules: dict[str, Source]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        sent = self.modules[fullname]
        spec = ModuleSpec(fullname, self, origin=sent.file, is_package=sent.is_package)
        spec.has_location = True  # tracebacks and `__file__` name the driver's file
        if sent.is_package:  # for submodules that the driver had not imported
            spec.submodule_search_locations = [str(Path(sent.file).parent)]
        return spec

    def get_source(self, fullname: str) -> str:
        return self.modules[fullname].text

    def get_code(self, fullname: str) -> CodeType:
        sent = self.modules[fullname]
        return self.source_to_code(sent.text, sent.file)
