"""How fast rounds are on this machine, and how close they come to its peak performance.

The workloads are those that other simulators are measured on. Images are noise added to one
picture per class, so that a model can learn. A round includes client selection, plans, training,
weighting, aggregation and the server update; evaluation is measured separately.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.config.experiment import Clients, Experiment, LocalTraining, Named
from fedlens.config.options import did_you_mean
from fedlens.core.federation import Dataset, Examples
from fedlens.engines import Engine, Processes
from fedlens.engines.gpus import gpu_names, in_a_child
from fedlens.evaluation.evaluate import evaluate
from fedlens.models import MODELS
from fedlens.network.network import Network
from fedlens.network.ops import normalise
from fedlens.rounds import RoundInput, begin, run_rounds
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.work import Part, Shared, Work
from fedlens.runs.loop import torch_settings
from fedlens.runs.summary import peak_memory
from fedlens.setup import Setup, build

POPULATION = 2  # times as many clients as in a round
CLASSES = 10
TESTED = 10_000  # images that an evaluation is timed on
TESTED_BY_CPU = 1000  # a CPU would take ten times as long for all


@dataclass(frozen=True)
class Workload:
    """A round of `clients`, each with `steps` steps on batches of `batch` images."""

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
    "pfl-cnn-1000": Workload("pfl-cnn", (3, 32, 32), 1000, 5, 10),
    "hsu-cnn-100": Workload("hsu-cnn", (3, 32, 32), 100, 8, 64, {"padding": "same"}),
    "resnet18": Workload("resnet18", (3, 32, 32), 10, 8, 32, {"stem": "cifar", "norm": "group"}),
    "mobilenetv2": Workload("mobilenetv2", (3, 32, 32), 10, 8, 32, {"norm": "group"}),
}


COMMON = ["pfl-cnn", "hsu-cnn", "mcmahan-cnn"]  # measured for every simulator


def named(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}: {did_you_mean(name, WORKLOADS)}")
    return WORKLOADS[name]


def examples(work: Workload) -> Examples:
    """The images of all clients: each is the sum of its class's picture and noise."""
    rng = torch.Generator().manual_seed(0)
    channels, height, width = work.shape

    def noise(count: int) -> Tensor:  # channels last, as data sets are stored
        shape = (count, height, width, channels)
        return torch.randint(128, shape, generator=rng, dtype=torch.uint8).permute(0, 3, 1, 2)

    pictures = noise(CLASSES)
    labels = torch.randint(CLASSES, (POPULATION * work.samples,), generator=rng)
    return Examples(noise(len(labels)).add_(pictures[labels]), labels)


def experiment(work: Workload, engine: str, device: str, precision: str) -> Experiment:
    """The workload as an experiment."""
    train, channels = examples(work), work.shape[0]
    # A process that has initialised CUDA cannot fork workers: see engines/gpus.py.
    has_gpu = gpu_names if engine == "processes" else torch.cuda.is_available
    on_gpu = device != "cpu" and bool(has_gpu())
    test = train.take(torch.arange(TESTED if on_gpu else TESTED_BY_CPU) % len(train))
    classes = tuple(map(str, range(CLASSES)))
    level = (0.5,) * channels
    return Experiment(
        dataset=Dataset("noise", train, test, classes, level, level),
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
    precision: str = "auto",
    repeats: int = 3,
    seconds: float = 2.0,
    watch: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure a workload: the median of `repeats`, each of about `seconds`, after a warm-up."""
    work = named(name)

    def say(stage: str) -> None:
        if watch is not None:
            watch(f"{name}: {stage}")

    setup = build(experiment(work, engine, device, precision))
    try:
        with torch_settings(setup.experiment, setup.device, setup.threads):
            say("measuring the machine's limit")
            limit = _limit(setup)
            count_them = partial(_operations, work)
            # A process that has run autograd can fork no workers for the next workload.
            forks = isinstance(setup.engine, Processes)
            operations = in_a_child(count_them) if forks else count_them()
            say("warming up")
            one_round = rounds(setup)
            if setup.devices[0].type == "cuda":  # repeated shapes are captured as graphs
                time_of(one_round, 5, setup.device)
            once = max(time_of(one_round, 3, setup.device), 1e-4)
            count = max(int(seconds / once), 1)
            times, busy = [], setup.engine.busy_seconds
            for repeat in range(repeats):
                say(f"repeat {repeat + 1} of {repeats}: {count} rounds")
                times.append(time_of(one_round, count, setup.device))
            taken = statistics.median(times)
            spent = sum(times) * count * setup.engine.num_workers
            busy = (setup.engine.busy_seconds - busy) / spent
            say("measuring where the time goes")
            parts = _parts(setup, work, taken)
    finally:
        setup.engine.close()
    return {
        "workload": f"{name} {work.clients} x {work.steps} x {work.batch}",
        "engine": setup.engine.name,
        "device": ", ".join(map(str, setup.devices)),
        "precision": setup.experiment.precision,
        "repeats": repeats,
        "seconds_per_round": taken,
        "spread": max(times) - min(times),
        "steps_per_second": work.clients * work.steps / taken,
        "samples_per_second": work.samples / taken,
        "limit_share": operations * work.clients * work.steps / taken / limit,
        "limit_flops": limit,
        "waiting_share": 1 - busy if busy else None,
        "padding_share": setup.engine.padding_share,
        **parts,
        "peak_memory_bytes": peak_memory(setup),
    }


def _parts(setup: Setup, work: Workload, taken: float) -> dict[str, float]:
    """The seconds of a round by part, and separately those to evaluate 10,000 images."""
    device, network = setup.device, setup.network
    server = time_of(rounds(replace(setup, engine=Idle(setup.network))), 3, device)
    workers = min(setup.engine.num_workers, work.clients)
    side_by_side = min(setup.engine.at_once, work.clients)
    if setup.devices != (device,):
        side_by_side = -(-work.clients // workers)
    batches = work.steps * -(-work.clients // side_by_side) / workers
    gather = batches * _where_trained(setup, partial(_gather, setup, side_by_side * work.batch))
    test = setup.parts["test"]
    state = begin(network, setup.program, setup.federation, device)
    judge = partial(
        evaluate, setup.engine, state, test, CLASSES, setup.program.algorithm.objective.loss
    )
    time_of(judge, 3, device)  # until its CUDA graph is captured, if it is
    return {
        "server_seconds": server,
        "gather_seconds": gather,
        "train_seconds": taken - server - gather,
        "evaluate_seconds": time_of(judge, 2, device) / len(test) * TESTED,
    }


def _gather(setup: Setup, count: int, device: torch.device) -> float:
    """Seconds to read and normalise this many images."""
    network, index = setup.network, torch.arange(count, device=device)
    images = setup.federation.examples.images[:count].to(device)
    made = partial(normalise, mean=network.mean, std=network.std, dtype=network.compute)
    return time_of(lambda: made(images[index]), 20, device)


def _where_trained(setup: Setup, measure: Callable[[torch.device], float]) -> float:
    """Run `measure` on the clients' device; in a forked process if only workers may use it."""
    device = setup.devices[0]
    return measure(device) if device == setup.device else in_a_child(partial(measure, device))


@dataclass
class Idle(Engine):
    """An engine whose clients train nothing, so that a round is the server's work alone."""

    network: Network
    name: ClassVar[str] = "idle"

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        counters = {n: b[0] for n, b in shared.buffers.items() if not b.is_floating_point()}
        loss = torch.zeros(len(work), device=next(iter(shared.params.values())).device)
        update = {name: torch.zeros_like(t[0]) for name, t in shared.exact.items()}
        yield Part(update, counters, {}, [{}] * len(work), {"loss": loss}, True, borrowed=False)


def rounds(setup: Setup) -> Callable[[], None]:
    """A function that runs the next round at each call."""
    return rounds_together([setup], setup.engine)


def rounds_together(setups: Sequence[Setup], engine: Engine) -> Callable[[], None]:
    """The same for several experiments with their clients in one cohort."""
    turns = [
        RoundInput(s.program, s.federation, begin(s.network, s.program, s.federation, s.device), i)
        for i, s in enumerate(setups)
    ]
    like = next(iter(turns[0].state.params.values()))
    together = ClientProgram.joint([s.program for s in setups], like)

    def one_round() -> None:
        nonlocal turns
        after = run_rounds(together, engine, turns)
        turns = [replace(turn, state=state) for turn, (state, _) in zip(turns, after, strict=True)]

    return one_round


HEADER = [
    *("workload", "s a round", "steps/s", "samples/s", "of limit", "waiting"),
    *("server", "gather", "train", "evaluate 10,000", "peak memory"),
]


def row(found: dict[str, Any]) -> list[str]:
    """The measurements of a workload as text, below `HEADER`."""
    waiting, seconds = found["waiting_share"], ("server", "gather", "train", "evaluate")
    return [
        found["workload"],
        f"{found['seconds_per_round']:.4g}",
        f"{found['steps_per_second']:,.0f}",
        f"{found['samples_per_second']:,.0f}",
        f"{found['limit_share']:.0%}",
        "-" if waiting is None else f"{waiting:.0%}",
        *(f"{found[f'{part}_seconds']:.3g} s" for part in seconds),
        f"{found['peak_memory_bytes'] / 2**20:,.0f} MiB",
    ]


def time_of(work: Callable[[], object], count: int, device: torch.device) -> float:
    """Mean seconds of one call, over `count` calls."""
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
    """Operations per second of a large matrix product, on all cores or all GPUs."""
    count = len(setup.devices) if setup.devices[0].type == "cuda" else 1
    return count * _where_trained(setup, partial(_products, setup.network.compute))


def _products(dtype: torch.dtype, device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 2048
    a, b = torch.rand(2, size, size, device=device, dtype=dtype)
    time_of(lambda: a @ b, 1, device)
    return 2 * size**3 / min(time_of(lambda: a @ b, 1, device) for _ in range(4))


def _operations(work: Workload) -> int:
    """Operations of one step: those of convolutions and linear layers, forward and backward.

    They are counted from shapes on the meta device: nothing is computed.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        module = MODELS[work.model](work.shape, CLASSES, **work.options)
        images = torch.empty(work.batch, *work.shape)
        labels = torch.empty(work.batch, dtype=torch.long)
        F.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
