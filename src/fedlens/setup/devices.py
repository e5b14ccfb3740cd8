"""The precision and the devices of a run."""

from __future__ import annotations

import os
from typing import Literal

import torch

from fedlens.config.experiment import Experiment
from fedlens.engines import cluster
from fedlens.engines.gpus import all_have_bf16, gpu_names, has_bf16

PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "tf32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "fp64": (torch.float64, torch.float64),
}  # dtype of parameters, dtype of multiplications


def precision_of(
    experiment: Experiment, device: torch.device, devices: list[torch.device]
) -> Literal["fp32", "tf32", "bf16", "fp64"]:
    """The precision; `auto` is bf16 if clients train on GPUs with it, else fp32 (see results/)."""
    if experiment.precision != "auto":
        return experiment.precision
    if experiment.engine == "ray":
        have_bf16 = bool(devices) and all(gpu.has_bf16 for gpu in cluster.gpus())
        return "bf16" if have_bf16 else "fp32"
    if devices:
        return "bf16" if all_have_bf16() else "fp32"
    return "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"


def own_threads() -> int:
    """The threads of a new run in this process: those of OMP_NUM_THREADS, otherwise one.

    Threads of one operation wait for each other, which takes many times as long as the operation
    if other programs run. Their number also decides how results are rounded.
    """
    return torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else 1


def devices_of(experiment: Experiment) -> tuple[torch.device, list[torch.device]]:
    """The device of the server, and the GPUs of workers, if they have GPUs of their own."""
    name = experiment.device
    try:
        device = torch.device("cuda" if name == "auto" else name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}: choose auto, cpu or cuda") from error
    if device.type == "mps":
        raise ValueError(
            'device is "mps", but updates are added up in float64, which GPUs of Apple do not '
            "have: set device=cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}: choose auto, cpu or cuda")
    if device.type == "cpu":
        return device, []
    here = torch.device("cpu")
    if experiment.engine in ("processes", "ray"):  # a child process queries GPUs: see gpus.py
        count = len(gpu_names()) if experiment.engine == "processes" else len(cluster.gpus())
        found = [torch.device("cuda", number) for number in range(count)]
        if device.index is not None and experiment.engine == "ray":
            raise ValueError(f"device is {name!r}, but Ray deals out GPUs itself: choose cuda")
        devices = found if device.index is None else [one for one in found if one == device]
        if devices or name == "auto":
            return here, devices
        if found:
            raise ValueError(
                f"device is {name!r}, but torch sees {len(found)} GPUs: choose cuda for all of "
                "them, or one from cuda:0 on"
            )
    elif torch.cuda.is_available():
        return device, []
    elif name == "auto":
        return here, []
    raise ValueError(f"device is {name!r}, but torch sees no GPU: choose cpu")
