"""Engines run the client program for every client of a cohort. They depend on no algorithm."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from fedlens.engines.actor import OnDisk
from fedlens.engines.engine import Engine, Unreported
from fedlens.engines.processes import Processes
from fedlens.engines.ray import Ray
from fedlens.engines.sequential import Sequential
from fedlens.engines.stacked import Stacked
from fedlens.federation import Examples
from fedlens.network.network import Network

Build = Callable[
    [Network, Examples, Sequence[torch.device], Sequence[Examples], OnDisk | None], Engine
]
"""Makes an engine from: the network, the training examples, the devices of the workers, other
example sets to evaluate, and how workers on other machines open images from disk (None: images are
sent)."""

ENGINES: dict[str, Build] = {
    "sequential": lambda network, examples, *_: Sequential(network, examples),
    "stacked": lambda network, examples, *_: Stacked(network, examples),
    "processes": lambda network, examples, devices, others, _: Processes(
        network, examples, devices=devices, others=others
    ),
    "ray": lambda network, examples, devices, others, on_disk: Ray(
        network, examples, devices=devices, others=others, on_disk=on_disk
    ),
}

EngineName = Literal["auto", "sequential", "stacked", "processes", "ray"]
"""The values of `engine` in an experiment: a key of ENGINES, or auto: the machine decides."""

__all__ = [
    "ENGINES",
    "Engine",
    "EngineName",
    "Processes",
    "Ray",
    "Sequential",
    "Stacked",
    "Unreported",
]
