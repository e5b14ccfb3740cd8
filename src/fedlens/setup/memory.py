"""Whether a run fits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fedlens.algorithm import Algorithm
from fedlens.config.experiment import Experiment, Named
from fedlens.config.names import MODELS
from fedlens.config.options import call
from fedlens.core.federation import Dataset, Split
from fedlens.engines.processes import num_cores
from fedlens.setup.devices import PRECISIONS
from fedlens.storage import free_memory as memory


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
    memory.demand(
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
