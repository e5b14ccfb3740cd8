"""The engine of an experiment."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from fedlens.engines import ENGINES, Engine, cluster
from fedlens.engines.actor import OnDisk
from fedlens.engines.processes import num_cores
from fedlens.experiment import Experiment
from fedlens.federation import Examples
from fedlens.network.network import Network


def engine_of(
    experiment: Experiment,
    network: Network,
    train: Examples,
    device: torch.device,
    devices: Sequence[torch.device],
    others: Sequence[Examples],
    on_disk: OnDisk | None,
) -> Engine:
    name: str = experiment.engine
    if name == "auto":
        name = automatic_engine(device, experiment.clients.cohort)
    if name == "ray":
        cluster.check()
    return ENGINES[name](network, train, devices, others, on_disk)


def automatic_engine(device: torch.device, cohort: int) -> str:
    """GPU: stacked. CPU: processes where there are several cores and clients to share them."""
    if device.type == "cuda":
        return "stacked"
    return "processes" if sys.platform == "linux" and min(num_cores(), cohort) > 1 else "sequential"
