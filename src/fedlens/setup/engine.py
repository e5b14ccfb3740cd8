"""The engine of an experiment."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch

from fedlens.config.experiment import Experiment
from fedlens.config.names import ENGINES
from fedlens.core.federation import Examples
from fedlens.engines import Engine, cluster
from fedlens.engines.processes import num_cores
from fedlens.engines.ray import OnDisk
from fedlens.network.network import Network
from fedlens.setup.tryouts import stacking_fails

logger = logging.getLogger(__name__)


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
    if (name == "stacked" or devices) and len(train):  # workers on GPUs stack their clients, too
        why = stacking_fails(network, train.read(slice(0, 2)).cpu())
        told = f"engine {name} cannot train many clients of this model at once ({why})"
        if why and experiment.engine == "auto":
            line = "%s: engine sequential trains one after another"
            logger.warning(line, told, extra={"once": True})
            name = "sequential"
        elif why:
            on_cpu = device.type == "cpu" and not devices
            choice = '"sequential" or "processes"' if on_cpu else '"sequential"'
            raise ValueError(f"{told}: choose engine = {choice}")
    made: Engine = ENGINES[name](network, train, devices, others, on_disk)
    return made


def automatic_engine(device: torch.device, cohort: int) -> str:
    """GPU: stacked. CPU: processes on Linux with several cores and clients, else sequential."""
    if device.type == "cuda":
        return "stacked"
    return "processes" if sys.platform == "linux" and min(num_cores(), cohort) > 1 else "sequential"
