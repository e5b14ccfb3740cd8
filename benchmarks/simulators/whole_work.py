"""Images, clients, evaluation and model of a whole run, for simulators other than Fedlens.

The one argument is JSON: the fields of `whole_runs.Whole`, a device, and the path of the model.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.data import DATASETS, Source
from fedlens.models import MODELS

asked: Any = SimpleNamespace(**json.loads(sys.argv[1]))
device = torch.device(asked.device)


def images_and_labels() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images as floats [N, channels, H, W] and labels [N], then those of the test set."""
    found = DATASETS[asked.dataset](Source())
    parts = []
    for part in (found.train, found.test):
        parts += [(part.images.to(device).float() / 255 - 0.5) / 0.5, part.labels.to(device)]
    return parts[0], parts[1], parts[2], parts[3]


def members(num_examples: int) -> list[Tensor]:
    """The example indices of each client: equal parts of a shuffled set."""
    torch.manual_seed(0)
    return list(torch.randperm(num_examples, device=device).tensor_split(asked.clients))


def model(images: Tensor) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[asked.model](tuple(images.shape[1:]), 10).to(device)


@torch.no_grad()
def evaluate(module: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy."""
    module.eval()
    loss, right = torch.zeros((), device=device), torch.zeros((), device=device)
    for first in range(0, len(labels), 1000):
        wanted = labels[first : first + 1000]
        logits = module(images[first : first + 1000])
        loss += F.cross_entropy(logits, wanted, reduction="sum")
        right += (logits.argmax(1) == wanted).sum()
    return float(loss) / len(labels), float(right) / len(labels)
