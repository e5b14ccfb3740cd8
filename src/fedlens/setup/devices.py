"""What a run computes in, and where."""

from __future__ import annotations

from typing import Literal

import torch

from fedlens.engines import cluster
from fedlens.engines.gpus import all_have_bf16, gpu_names, has_bf16
from fedlens.experiment import Experiment

PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "tf32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "fp64": (torch.float64, torch.float64),
}  # what parameters are kept in, what they are multiplied in


def precision_of(
    experiment: Experiment, device: torch.device, devices: list[torch.device]
) -> Literal["fp32", "tf32", "bf16", "fp64"]:
    """`auto`: bf16 where clients train on a GPU that has it, else fp32 (see results/)."""
    if experiment.precision != "auto":
        return experiment.precision
    if experiment.engine == "ray":
        have_bf16 = bool(devices) and all(gpu.has_bf16 for gpu in cluster.gpus())
        return "bf16" if have_bf16 else "fp32"
    if devices:
        return "bf16" if all_have_bf16() else "fp32"
    return "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"


def devices_of(experiment: Experiment) -> tuple[torch.device, list[torch.device]]:
    """Where the server is, and where workers train if that is elsewhere: each on a GPU."""
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
    if experiment.engine in ("processes", "ray"):  # only a child may ask for GPUs: see gpus.py
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
