"""The global PyTorch settings of an experiment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fedlens.config.experiment import Experiment
from fedlens.engines.trainer import TorchSettings


@contextlib.contextmanager
def torch_settings(
    experiment: Experiment, device: torch.device, num_threads: int = 1
) -> Iterator[None]:
    """Set precision, threads and determinism for an experiment, and restore them afterwards."""
    before, threads = TorchSettings.here(), torch.get_num_threads()
    now = before._replace(
        matmul="high" if experiment.precision == "tf32" else "highest",
        tf32=experiment.precision == "tf32",
    )
    if experiment.deterministic:
        now = now._replace(deterministic=True, workspace=before.workspace or ":4096:8")
    try:
        # Beside a GPU, the CPU has only small operations: waking threads costs more than the work.
        torch.set_num_threads(1 if device.type == "cuda" else num_threads)
        now.apply()
        yield
    finally:
        torch.set_num_threads(threads)
        before.apply()
