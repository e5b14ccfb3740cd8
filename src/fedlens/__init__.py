"""Fedlens: federated learning for vision.

import fedlens as fl

result = fl.run(fl.Experiment(dataset="fashion-mnist-mini", model="lenet5", rounds=5))
print(result.final["test_accuracy"])
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedlens.version import __version__

if sys.platform == "win32":
    raise ImportError("Fedlens runs on Linux and macOS: on Windows, use it in WSL")

if TYPE_CHECKING:
    from fedlens.algorithm import Algorithm, Amendment, compose, paper
    from fedlens.config.experiment import (
        Clients,
        Evaluate,
        Experiment,
        LocalTraining,
        Named,
        Server,
    )
    from fedlens.core.federation import Dataset, Examples, Federation, Holdings, Pool
    from fedlens.data.augment import Augment
    from fedlens.data.map_style import map_style
    from fedlens.deploy.classifier import Classifier, load
    from fedlens.report.compare import Comparison, compare
    from fedlens.runs.grid import grid
    from fedlens.runs.result import Result
    from fedlens.runs.run import resume, run
    from fedlens.runs.sweep import sweep
    from fedlens.runs.track import tracking

HOMES = {
    name: module
    for module, names in {
        "algorithm": "Algorithm Amendment compose paper",
        "config.experiment": "Clients Evaluate Experiment LocalTraining Named Server",
        "core.federation": "Dataset Examples Federation Holdings Pool",
        "data.augment": "Augment",
        "data.map_style": "map_style",
        "deploy.classifier": "Classifier load",
        "report.compare": "Comparison compare",
        "runs.grid": "grid",
        "runs.result": "Result",
        "runs.run": "resume run",
        "runs.sweep": "sweep",
        "runs.track": "tracking",
    }.items()
    for name in names.split()
}
"""The module of each public name, imported on first use: `fedlens --help` needs no PyTorch."""

__all__ = [
    "Algorithm",
    "Amendment",
    "Augment",
    "Classifier",
    "Clients",
    "Comparison",
    "Dataset",
    "Evaluate",
    "Examples",
    "Experiment",
    "Federation",
    "Holdings",
    "LocalTraining",
    "Named",
    "Pool",
    "Result",
    "Server",
    "__version__",
    "compare",
    "compose",
    "grid",
    "load",
    "map_style",
    "paper",
    "resume",
    "run",
    "sweep",
    "tracking",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'fedlens' has no attribute {name!r}")
    found = getattr(import_module(f"fedlens.{HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
