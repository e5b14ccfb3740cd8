"""How much of a run is evaluation, at the cadence of the papers?

    python benchmarks/evaluation.py [--only NAME ...] [--repeats 3] [--device auto] [--json]

For each workload, rounds and evaluations of the whole test set are timed in turns, on random images
of the papers' sizes. It prints the medians, and the share of evaluation in a run that is evaluated
as often as in the paper. Without --only it measures the two that are quick on a CPU. The aim is
less than 10 %; but a round of paper 3 on Fashion-MNIST trains on 2,500 images and evaluates 10,000.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any, NamedTuple

import torch

import fedlens as fl
from fedlens.evaluation.evaluate import evaluate
from fedlens.evaluation.metrics import metrics
from fedlens.rounds import begin, run_round
from fedlens.setup import build


class Workload(NamedTuple):
    model: str
    shape: tuple[int, int, int]
    num_train: int
    clients: int
    per_round: int
    epochs: int
    batch_size: int
    every: int  # rounds between two evaluations


NUM_TEST = 10_000
WORKLOADS = {
    "paper 1": Workload("resnet18", (3, 32, 32), 50_000, 5, 3, 3, 32, 1),
    "paper 2": Workload("hsu-cnn", (3, 32, 32), 50_000, 100, 10, 1, 64, 100),
    "paper 3, Fashion-MNIST": Workload("fedns-cnn", (1, 28, 28), 500, 10, 10, 5, 10, 1),
    "paper 3, CIFAR-10": Workload("alexnet-32", (3, 32, 32), 5_000, 10, 10, 5, 10, 1),
    "paper 4": Workload("mcmahan-cnn", (1, 28, 28), 60_000, 100, 10, 10, 128, 1),
}
QUICK = ("paper 2", "paper 3, Fashion-MNIST")


def measure(name: str, repeats: int, device: str) -> dict[str, Any]:
    work = WORKLOADS[name]
    rng = torch.Generator().manual_seed(0)

    def part(count: int) -> fl.Examples:
        images = torch.randint(256, (count, *work.shape), dtype=torch.uint8, generator=rng)
        return fl.Examples(images, torch.randint(10, (count,), generator=rng))

    channels = (0.5,) * work.shape[0]
    data = fl.Dataset(
        "random", part(work.num_train), part(NUM_TEST), tuple("0123456789"), channels, channels
    )
    local = fl.LocalTraining(epochs=work.epochs, batch_size=work.batch_size, lr=0.01)
    clients = fl.Clients(count=work.clients, per_round=work.per_round)
    model = fl.Named(work.model)
    setup = build(fl.Experiment(data, model, 1, device=device, local=local, clients=clients))
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    loss = setup.program.algorithm.objective.loss
    rounds, evaluations = [], []
    try:
        for _ in range(repeats + 1):
            start = _now(setup.device)
            state, _ = run_round(setup.program, setup.federation, setup.engine, state, seed=0)
            trained = _now(setup.device)
            metrics(evaluate(setup.engine, state, setup.parts["test"], 10, loss))
            rounds.append(trained - start)
            evaluations.append(_now(setup.device) - trained)
    finally:
        setup.engine.close()
    round_seconds, evaluation = (statistics.median(t[1:]) for t in (rounds, evaluations))
    return {
        "workload": f"{name}, {work.model}",
        "every": work.every,
        "round_seconds": round_seconds,
        "evaluation_seconds": evaluation,
        "share": evaluation / (evaluation + work.every * round_seconds),
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = arguments.only or QUICK
    rows = [measure(name, arguments.repeats, arguments.device) for name in chosen]
    on_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    what = torch.cuda.get_device_name() if on_gpu else platform.machine()
    machine = f"{what}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if arguments.json:
        print(json.dumps({"machine": machine, "repeats": arguments.repeats, "rows": rows}))
        return
    print(f"{machine}, median of {arguments.repeats}, {NUM_TEST:,} test images")
    for row in rows:
        print(
            f"{row['workload']:<38} round {row['round_seconds']:7.3f} s   evaluation "
            f"{row['evaluation_seconds']:6.3f} s every {row['every']:>3}   {row['share']:6.1%}"
        )


if __name__ == "__main__":
    main()
