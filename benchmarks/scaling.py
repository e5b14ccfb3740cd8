"""Does a round cost more when more clients stand by? Does memory follow the cohort?

    python benchmarks/scaling.py [--clients 10 100 1000 10000] [--cohorts 10 100] [--repeats 3]
                                 [--splits fixed drawn fresh] [--algorithms fedavg scaffold]

Rounds of lenet5, 50 images per client, ten clients per round unless stated otherwise, engine
`sequential` with one thread. All clients share one pool of images, so that only their number
changes. A client's images are drawn once and stored in a list (`fixed`), drawn once and redrawn
from the seed at every access (`drawn`), or drawn anew in every round (`fresh`). Each line is
measured in separate processes, in turns. It has the median of the repeats in CPU time, which other
programs on the machine disturb little; the server's part of it; and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.config.names import ALGORITHMS, MODELS
from fedlens.core.federation import Federation, Fixed, Holdings, Pool
from fedlens.data.partitions import PARTITIONS
from fedlens.engines import Engine, Sequential
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.work import Part, Shared, Work
from fedlens.runs.bench import Workload, examples

POOL = Workload("lenet5", (1, 28, 28), clients=100, steps=5, batch=10)
HELD = POOL.steps * POOL.batch


class Case(NamedTuple):
    """The configuration of one line."""

    clients: int
    cohort: int
    split: str
    algorithm: str


@dataclass
class Timed(Engine):
    """Wraps an engine and measures the CPU seconds of its clients."""

    network: Network
    of: Engine
    seconds: float = 0.0
    name: ClassVar[str] = "timed"

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        parts = self.of.map(program, shared, work)
        while True:
            start = time.process_time()
            part = next(parts, None)
            self.seconds += time.process_time() - start
            if part is None:
                return
            yield part


def federation(num_clients: int, split: str) -> Federation:
    pool = examples(POOL)
    if split != "fixed":
        each = HELD // 10
        dealt = PARTITIONS[split](
            Pool(pool, 10, num_clients, np.random.default_rng(0)), per_class=each
        )
        return Federation(pool, 10, dealt)
    rng = torch.Generator().manual_seed(0)
    index = torch.randint(len(pool), (num_clients * HELD,), generator=rng)
    offsets = torch.arange(num_clients + 1) * HELD
    return Federation(pool, 10, Fixed(Holdings(index, offsets)))


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Measure one configuration in this process."""
    torch.set_num_threads(1)
    clients = federation(case.clients, case.split)
    network = Network(MODELS[POOL.model](POOL.shape, 10), (0.5,), (0.5,))
    plain = Algorithm(Uniformly(case.cohort), Epochs(1, POOL.batch), solve=Sgd(0.05))
    program = ClientProgram(compose(plain, ALGORITHMS[case.algorithm]()), network.layout)

    engine = Timed(network, Sequential(network, clients.examples))
    state = begin(network, program, clients, torch.device("cpu"))
    wholes, servers = [], []
    for _ in range(rounds + 2):
        start, engine.seconds = time.process_time(), 0.0
        state, _ = run_round(program, clients, engine, state, seed=0)
        wholes.append(time.process_time() - start)
        servers.append(wholes[-1] - engine.seconds)
    return {
        "seconds": statistics.median(wholes[2:]),
        "server_seconds": statistics.median(servers[2:]),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def elsewhere(case: Case, rounds: int) -> dict[str, float]:
    """Measure one configuration in a separate process."""
    words = ["--one", *map(str, case), "--rounds", str(rounds)]
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--cohorts", type=int, nargs="*", default=[10, 100])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--splits", nargs="*", choices=["fixed", "drawn", "fresh"], default=["fixed"]
    )
    parser.add_argument("--algorithms", nargs="*", choices=sorted(ALGORITHMS), default=["fedavg"])
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.one:
        clients, cohort, *names = arguments.one
        print(json.dumps(measure(Case(int(clients), int(cohort), *names), arguments.rounds)))
        return
    sizes = [(clients, 10) for clients in arguments.clients]
    sizes += [(1_000, cohort) for cohort in arguments.cohorts if (1_000, cohort) not in sizes]
    cases = [
        Case(*size, split, algorithm)
        for split, algorithm in product(arguments.splits, arguments.algorithms)
        for size in sizes
    ]
    found: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(arguments.repeats):
        for case in cases:
            print(f"repeat {repeat + 1}: {case}", file=sys.stderr, flush=True)
            found[case].append(elsewhere(case, arguments.rounds))
    rows: list[dict[str, Any]] = [
        case._asdict() | {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for case, runs in found.items()
    ]
    about = {"torch": torch.__version__, "repeats": arguments.repeats, "rounds": arguments.rounds}
    if arguments.json:
        print(json.dumps({**about, "rows": rows}))
        return
    print(f"torch {torch.__version__}, median of {arguments.repeats} x {arguments.rounds} rounds")
    for row in rows:
        print(
            f"{row['split']} {row['algorithm']:<9} {row['clients']:>10,} clients, "
            f"{row['cohort']:>4} a round   "
            f"{1e3 * row['seconds']:8.2f} ms CPU   server {1e3 * row['server_seconds']:6.2f} ms   "
            f"{row['peak_memory_bytes'] / 2**20:6.0f} MiB"
        )


if __name__ == "__main__":
    main()
