"""What a run depends on besides its experiment: versions, machine, partition, code."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlens.build import Setup
from fedlens.engines.gpus import gpu_names
from fedlens.experiment import Experiment, Named
from fedlens.version import __version__


def partition_hash(setup: Setup) -> str:
    """A fingerprint of who holds what."""
    return setup.federation.described().digest()


def manifest(setup: Setup) -> dict[str, Any]:
    """What is written down when a run starts."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "fedlens": __version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": ", ".join(_name(setup, device) for device in setup.devices),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "engine": setup.engine.name,
        "precision": setup.experiment.precision,
        "at_once": setup.engine.clients_at_once,
        "seed": setup.experiment.seed,
        "partition": partition_hash(setup),
        "parameters": setup.network.num_parameters,
        "weights": setup.weights._asdict() if setup.weights else None,
        "classes": list(setup.dataset.classes),
        "left_out": [one._asdict() for one in setup.dataset.left_out],
        "code": _own_code(setup.experiment),
    }


def _name(setup: Setup, device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if device == setup.device:
        return torch.cuda.get_device_name(device)
    return gpu_names()[device.index]  # a worker's: this process asks it nothing


def _own_code(experiment: Experiment) -> list[str]:
    """The folders of the functions named by import path: a resumed run finds them there again."""
    clients = experiment.clients
    chosen = [experiment.dataset, experiment.model, clients.partition, clients.devices]
    chosen += experiment.algorithm
    names = [one.name for one in chosen if isinstance(one, Named)]
    names += [experiment.loss, str(clients.partition.options.get("of", ""))]
    names = [name for name in names if ":" in name and name.partition(":")[0] in sys.modules]
    folders = set()
    for name in names:
        module = sys.modules[name.partition(":")[0].partition(".")[0]]
        if module.__file__ is not None:
            home = Path(module.__file__).resolve()
            folders.add(str(home.parents[1 if home.name == "__init__.py" else 0]))
    return sorted(folders)


def _revision() -> str | None:
    """The commit that runs, where Fedlens is run from a checkout of its own."""
    home = Path(__file__).resolve().parents[3]
    if not (home / ".git").exists():
        return None
    command = ["git", "-C", str(home), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None
