"""The model, images and clients that are the same for every simulator.

It also runs in the environments of the peers, which have torch and numpy. They have Fedlens'
sources on their path for the models and the workloads.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.models import MODELS
from fedlens.runs.bench import POPULATION, WORKLOADS, Workload, examples

LR = 0.05
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def arguments() -> tuple[Workload, int]:
    """The workload and the number of rounds from the command line."""
    return WORKLOADS[sys.argv[1]], int(sys.argv[2])


@functools.lru_cache(maxsize=1)
def data(name: str) -> tuple[Tensor, Tensor]:
    """Images as floats [N, channels, H, W] and labels [N]; client k has the k-th equal part."""
    found = examples(WORKLOADS[name])
    images = (found.images.float() / 255 - 0.5) / 0.5
    return images.to(DEVICE), found.labels.to(DEVICE)


def members(work: Workload, client: int) -> slice:
    size = work.steps * work.batch
    return slice(client * size, (client + 1) * size)


def num_clients(work: Workload) -> int:
    return POPULATION * work.clients


def model(work: Workload) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[work.model](work.shape, 10, **work.options).to(DEVICE)


def train(module: nn.Module, images: Tensor, labels: Tensor, batch: int) -> None:
    """Train one client for one epoch, as a researcher would write it."""
    module.train()
    optimiser = torch.optim.SGD(module.parameters(), lr=LR)
    for index in torch.split(torch.randperm(len(labels), device=labels.device), batch):
        optimiser.zero_grad()
        F.cross_entropy(module(images[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


class Watch:
    """Seconds of each round and the loss after it; measuring the loss is not timed."""

    def __init__(self, name: str) -> None:
        images, labels = data(name)
        self.images, self.labels = images[:256], labels[:256]
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.start = time.perf_counter()

    @torch.no_grad()
    def round_is_over(self, module: nn.Module) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        was, _ = module.training, module.eval()
        self.losses.append(float(F.cross_entropy(module(self.images), self.labels)))
        module.train(was)
        self.start = time.perf_counter()

    def report(self, *packages: str, settings: str) -> None:
        """Print the measurements as the last line, without the first round, a warm-up."""
        versions = {package: version(package) for package in ("torch", *packages)}
        measured = {"seconds": self.seconds[1:], "losses": self.losses}
        print(json.dumps({**measured, "versions": versions, "settings": settings}), flush=True)
