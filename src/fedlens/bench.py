"""How fast rounds are on this machine, and how near they come to what it can do.

The workloads are those that other simulators are measured on. Images are random bytes: what
training does with them takes the same time. A round is all of it: choosing clients, drawing plans,
training, weighing, combining and advancing; evaluation is apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fedlens.build import Setup, build
from fedlens.core import Dataset, Examples
from fedlens.experiment import Clients, Experiment, LocalTraining, Named
from fedlens.models import MODELS
from fedlens.rounds import begin, run_round
from fedlens.settings import torch_settings
from fedlens.summary import peak_memory

POPULATION = 4  # times the clients of a round
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """Clients a round, each of which takes `steps` steps on batches of `batch` images."""

    model: str
    shape: tuple[int, int, int]
    clients: int
    steps: int
    batch: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Images that a round trains on."""
        return self.clients * self.steps * self.batch


WORKLOADS = {
    "pfl-cnn": Workload("pfl-cnn", (3, 32, 32), 50, 5, 10),
    "hsu-cnn": Workload("hsu-cnn", (3, 32, 32), 10, 8, 64, {"padding": "same"}),
    "mcmahan-cnn": Workload("mcmahan-cnn", (1, 28, 28), 10, 60, 10),
}


def experiment(work: Workload, engine: str, device: str, precision: str) -> Experiment:
    """The workload as an experiment on random images."""
    rng = torch.Generator().manual_seed(0)
    count = POPULATION * work.samples
    channels = work.shape[0]
    pixels = torch.randint(
        256, (count, *work.shape[1:], channels), generator=rng, dtype=torch.uint8
    )
    labels = torch.randint(CLASSES, (count,), generator=rng)
    examples = Examples(pixels.permute(0, 3, 1, 2), labels)
    classes = tuple(map(str, range(CLASSES)))
    level = (0.5,) * channels
    return Experiment(
        dataset=Dataset("random", examples, examples.take(torch.arange(1)), classes, level, level),
        model=Named(work.model, work.options),
        rounds=1,
        engine=engine,  # type: ignore[arg-type]
        device=device,
        precision=precision,  # type: ignore[arg-type]
        clients=Clients(
            count=POPULATION * work.clients, per_round=work.clients, partition=Named("iid")
        ),
        local=LocalTraining(batch_size=work.batch, lr=0.01),
    )


def bench(
    name: str,
    *,
    engine: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    repeats: int = 3,
    seconds: float = 2.0,
    watch: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure a workload: the median of `repeats`, each of about `seconds`, after a warm-up."""
    work = WORKLOADS[name]
    say = watch or (lambda _: None)
    setup = build(experiment(work, engine, device, precision))
    try:
        with torch_settings(setup.experiment, setup.device):
            say("measuring the machine's limit")
            limit = _limit(setup)
            say("warming up")
            one_round = rounds(setup)
            once = max(time_of(one_round, 3, setup.device), 1e-4)
            count = max(int(seconds / once), 1)
            times = []
            for repeat in range(repeats):
                say(f"repeat {repeat + 1} of {repeats}: {count} rounds")
                times.append(time_of(one_round, count, setup.device))
    finally:
        setup.engine.close()
    taken = statistics.median(times)
    return {
        "workload": f"{name} {work.clients} x {work.steps} x {work.batch}",
        "engine": type(setup.engine).__name__.lower(),
        "device": str(setup.device),
        "precision": precision,
        "repeats": repeats,
        "seconds_per_round": taken,
        "spread": max(times) - min(times),
        "samples_per_second": work.samples / taken,
        "limit_share": _operations(work) * work.clients * work.steps / taken / limit,
        "limit_flops": limit,
        "peak_memory_bytes": peak_memory(setup),
    }


def rounds(setup: Setup) -> Callable[[], None]:
    """A function that runs one round after another."""
    state = begin(setup.network, setup.program, setup.federation, setup.device)

    def one_round() -> None:
        nonlocal state
        state, _ = run_round(setup.program, setup.federation, setup.engine, state, seed=0)

    return one_round


def time_of(work: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds of one, in a row of `count`."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    return (time.perf_counter() - start) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _limit(setup: Setup) -> float:
    """Operations a second of a large matrix product, by all cores or the whole GPU."""
    size = 8192 if setup.device.type == "cuda" else 2048
    a, b = torch.rand(2, size, size, device=setup.device, dtype=setup.network.compute)
    time_of(lambda: a @ b, 2, setup.device)
    return 2 * size**3 / min(time_of(lambda: a @ b, 3, setup.device) for _ in range(3))


def _operations(work: Workload) -> int:
    """What one step must compute: the products of its convolutions and linear layers, both ways."""
    from torch.utils.flop_counter import FlopCounterMode

    module = MODELS[work.model](work.shape, CLASSES, **work.options)
    images, labels = torch.rand(work.batch, *work.shape), torch.zeros(work.batch, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
