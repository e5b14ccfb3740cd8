"""The precision, the devices and the engine of a run, and whether it fits in memory."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from fedlens.algorithm import Algorithm
from fedlens.config.experiment import Experiment, Named
from fedlens.config.names import ENGINES, MODELS
from fedlens.config.options import call
from fedlens.core.federation import Dataset, Examples, Split
from fedlens.engines import Engine, cluster
from fedlens.engines.gpus import all_have_bf16, gpu_names, has_bf16
from fedlens.engines.ray import OnDisk
from fedlens.network.network import Network
from fedlens.setup.tryouts import stacking_fails
from fedlens.storage import free_memory
from fedlens.storage.free_memory import num_cores

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


def demand_memory(
    experiment: Experiment, dataset: Dataset, algorithm: Algorithm, split: Split
) -> None:
    """Raise an error if even the minimum memory of a round is not available."""
    sizes = split.sizes(0)
    cohort = algorithm.pace.buffer if algorithm.pace else experiment.clients.cohort
    if len(sizes) and sizes.stride(0) == 0:
        sizes = sizes[:1]  # an expanded tensor of equal sizes: `max` would copy it to full length
    held = int(sizes.max()) if len(sizes) else 0
    kept = PRECISIONS[experiment.precision][0].itemsize
    # Copies of the model: the server's, its next, and the sum of updates in float64; for each
    # client that trains at the same time, its own and its gradient.
    training = min(num_cores(), cohort) if experiment.engine in ("auto", "processes") else 1
    copies = 2 * kept + 8 + 2 * kept * training
    channels, height, width = dataset.shape
    padded = (height + 2 * experiment.augment.crop) * (width + 2 * experiment.augment.crop)
    batch = min(experiment.local.batch_size, held)
    # Confusion matrices: of a batch, of the batches before it, and their sum.
    answers = 3 * dataset.num_classes * (dataset.num_classes + 1) * 8
    free_memory.demand(
        "a round",
        {
            f"{training + 1} models": _num_parameters(experiment, dataset) * copies,
            "who sees which examples": cohort * algorithm.draw.plan_size(held) * 8,
            "a batch": batch * channels * padded * kept,
            "which labels were answered": answers if experiment.evaluate.on else 0,
        },
        "choose a smaller model, fewer classes, clients a round or local.epochs, or a smaller "
        "augment.crop",
    )


def _num_parameters(experiment: Experiment, dataset: Dataset) -> int:
    """The parameters of a built-in model, made without memory; 0 for others, made only once."""
    given = experiment.model
    if not isinstance(given, Named) or given.name not in MODELS:
        return 0
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _Undrawn():
        outputs = experiment.outputs or dataset.num_classes
        try:
            module = call(MODELS[given.name], dataset.shape, outputs, options=given.options)
        except (RuntimeError, TypeError, OverflowError):  # too large for a tensor
            return 2**60
        return sum(parameter.numel() for parameter in module.parameters())


class _Undrawn(TorchFunctionMode):
    """Skips random draws: on the device "meta", a normal draw takes seconds of imports."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "kaiming_normal_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs or {})
