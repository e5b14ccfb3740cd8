"""Fedlens: federated learning for vision.

import fedlens as fl

result = fl.run(fl.Experiment(dataset="fashion-mnist-mini", model="lenet5", rounds=5))
print(result.final["test_accuracy"])
"""

from fedlens.algorithm import Algorithm, Amendment, compose, paper
from fedlens.augment import Augment
from fedlens.core import Dataset, Examples, Federation, Holdings
from fedlens.experiment import Clients, Evaluate, Experiment, LocalTraining, Named, Server
from fedlens.report.compare import Comparison, compare
from fedlens.runs.active import Result
from fedlens.runs.run import resume, run
from fedlens.runs.sweep import grid, sweep
from fedlens.runs.track import tracking
from fedlens.version import __version__

__all__ = [
    "Algorithm",
    "Amendment",
    "Augment",
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
    "Result",
    "Server",
    "__version__",
    "compare",
    "compose",
    "grid",
    "paper",
    "resume",
    "run",
    "sweep",
    "tracking",
]
