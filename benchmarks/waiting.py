"""How much of a round do the workers of `processes` wait, where clients are equal and where not?

    python benchmarks/waiting.py [--rounds 7] [--workers 2]

It prints the share of the workers' time in a round in which they train no client: while the server
selects clients, adds up updates and takes its step, and while another worker trains the last
client. It measures the three common workloads, three equal clients of pfl-cnn, which two workers
cannot share evenly, and clients of pfl-cnn with very different numbers of images (lognormal, from 1
to several hundred). Results are medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from fedlens.algorithm.pieces import Uniformly
from fedlens.core.federation import Fixed, Holdings
from fedlens.engines import Processes
from fedlens.runs.bench import COMMON, WORKLOADS, Workload, experiment, rounds
from fedlens.runs.loop import torch_settings
from fedlens.setup import Setup, build

PFL = WORKLOADS["pfl-cnn"]


def equal(work: Workload) -> Setup:
    return build(experiment(work, "processes", "cpu", "fp32"))


def ragged(num_clients: int, cohort: int) -> Setup:
    """A setup with clients of very different sizes, whose images come from one shared pool."""
    setup = equal(PFL)
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(3.5, 1.2, num_clients).astype(int).clip(1, 1000)
    pool = len(setup.federation.examples)
    members = [torch.as_tensor(rng.integers(pool, size=size)) for size in sizes]
    algorithm = replace(setup.program.algorithm, select=Uniformly(cohort))
    return replace(
        setup,
        federation=replace(setup.federation, split=Fixed(Holdings.of(members))),
        program=replace(setup.program, algorithm=algorithm),
    )


def measure(what: str, setup: Setup, workers: int, count: int) -> None:
    examples = setup.federation.examples
    engine = Processes(setup.network, examples, workers)
    seconds, shares = [], []
    try:
        with torch_settings(setup.experiment, setup.device, setup.threads):
            one_round = rounds(replace(setup, engine=engine))
            one_round()
            for _ in range(count):
                busy, start = engine.busy_seconds, time.perf_counter()
                one_round()
                seconds.append(time.perf_counter() - start)
                shares.append(1 - (engine.busy_seconds - busy) / (workers * seconds[-1]))
    finally:
        engine.close()
    print(
        f"{what:32} {statistics.median(seconds):6.2f} s a round, waiting "
        f"{statistics.median(shares):5.1%} ({min(shares):.1%} to {max(shares):.1%})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    workers, count = arguments.workers, arguments.rounds
    print(f"torch {torch.__version__}, {workers} workers on {os.cpu_count()} cores", end=", ")
    print(f"medians of {count} rounds")
    for name in COMMON:
        work = WORKLOADS[name]
        what = f"{name} {work.clients} x {work.steps} x {work.batch}"
        measure(what, equal(work), workers, count)
    measure("three equal clients", equal(replace(PFL, clients=3)), workers, count)
    for cohort in (10, 50):
        measure(f"ragged clients, {cohort} of 200", ragged(200, cohort), workers, count)


if __name__ == "__main__":
    main()
