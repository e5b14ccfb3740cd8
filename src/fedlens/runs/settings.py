"""The global PyTorch settings of an experiment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from fedlens.config.experiment import Experiment

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS is deterministic only if this is set


@contextlib.contextmanager
def torch_settings(
    experiment: Experiment, device: torch.device, num_threads: int = 1
) -> Iterator[None]:
    """Set precision, threads and determinism for an experiment, and restore them afterwards."""
    precision = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    tf32, threads = experiment.precision == "tf32", torch.get_num_threads()
    workspace = os.environ.get(CUBLAS)
    try:
        # Beside a GPU, the CPU has only small operations: waking threads costs more than the work.
        torch.set_num_threads(1 if device.type == "cuda" else num_threads)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        if experiment.deterministic:
            os.environ.setdefault(CUBLAS, ":4096:8")
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions
        if experiment.deterministic:  # the call takes a second: torch imports its compiler
            torch.use_deterministic_algorithms(deterministic)
            if workspace is None:
                os.environ.pop(CUBLAS, None)
