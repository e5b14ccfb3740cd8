"""How long is the host's part of a round on a GPU? Measured without one.

    python benchmarks/host_part.py [--rounds 500] [--repeats 9]

A round of engine `stacked` consists of the host's work and of a recorded graph that the host
launches. Here the replay of that graph does nothing, and its outputs keep the values from the
recording. What remains is the host's part: selecting clients, drawing and packing their batches,
weights, sums, the server's step and, on the second line, writing the record of the round. The
workload is pfl-cnn, 50 x 5 x 10, with few pixels and channels, so that the server's arithmetic,
which a GPU would do, takes almost no time. The time that CUDA needs to launch kernels and the graph
is not included. It prints the CPU time of one thread per round, as the median of `--repeats`
measurements of `--rounds` rounds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedlens.config.sections import Evaluate
from fedlens.engines.graphs import Captures
from fedlens.engines.stacked import Stacked
from fedlens.runs.bench import CLASSES, WORKLOADS, experiment, rounds
from fedlens.runs.loop import train
from fedlens.setup import Setup, build

WORK = replace(WORKLOADS["pfl-cnn"], shape=(3, 8, 8))
WARM = 10  # rounds after which every graph is recorded


def narrow() -> nn.Module:
    """The layers of pfl-cnn, narrower; `stacked` still factors the first linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, CLASSES),
    )


class Still:
    """A capture that computes its function once, when it is captured, and never again."""

    def __init__(self, function: Callable[..., Any], inputs: Any, pool: Any) -> None:
        self.result = function(*inputs)

    def replay(self) -> None:
        pass


def setup_of(num_rounds: int) -> Setup:
    asked = replace(
        experiment(WORK, "stacked", "cpu", "fp32"),
        model=narrow(),
        rounds=num_rounds,
        evaluate=Evaluate(every=num_rounds),
    )
    setup = build(asked)
    engine = Stacked(
        setup.network, setup.federation.examples, make_recorder=lambda: Captures(make=Still)
    )
    return replace(setup, engine=engine)


def of_rounds(count: int) -> float:
    """CPU seconds of a round, as `fedlens bench` measures it."""
    setup = setup_of(count)
    one_round = rounds(setup)
    for _ in range(WARM):
        one_round()
    start = time.process_time()
    for _ in range(count):
        one_round()
    return (time.process_time() - start) / count


def of_runs(count: int) -> float:
    """CPU seconds of a round in a run, with its record but without evaluation."""
    ends: list[float] = []
    train(setup_of(WARM + count), watch=lambda _: ends.append(time.process_time()))
    return (ends[-2] - ends[WARM - 1]) / (count - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    found: dict[str, list[float]] = {"a round": [], "with its record": []}
    for _ in range(arguments.repeats):
        found["a round"].append(1e3 * of_rounds(arguments.rounds))
        found["with its record"].append(1e3 * of_runs(arguments.rounds))
    for what, times in found.items():
        middle = statistics.median(times)
        print(f"{what:16} {middle:.3f} ms ({min(times):.3f} to {max(times):.3f})")


if __name__ == "__main__":
    main()
