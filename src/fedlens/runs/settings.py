"""What an experiment asks of torch as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from fedlens.experiment import Experiment

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS gives the same bytes again only if this is set


@contextlib.contextmanager
def torch_settings(experiment: Experiment, device: torch.device) -> Iterator[None]:
    """Precision, threads and determinism as the experiment has them, put back afterwards."""
    precision = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    tf32, threads = experiment.precision == "tf32", torch.get_num_threads()
    workspace = os.environ.get(CUBLAS)
    try:
        if device.type == "cuda":  # beside a GPU there are only small things left for the CPU,
            torch.set_num_threads(1)  # and waking threads for them costs more than they do
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
        if experiment.deterministic:  # asking costs a second: torch imports its compiler
            torch.use_deterministic_algorithms(deterministic)
            if workspace is None:
                os.environ.pop(CUBLAS, None)
