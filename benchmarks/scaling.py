"""Does a round cost more when more clients stand by? Does memory follow the cohort?

    python benchmarks/scaling.py [--clients 10 100 1000 10000] [--cohorts 10 100] [--repeats 3]

Rounds of FedAvg, lenet5, 50 images a client, ten clients a round unless said otherwise, engine
`sequential` with one thread. All clients share one pool of images, so that only their number
changes. Each line is measured in processes of its own, in turns: the median of the repeats, in
CPU seconds, so that others on the machine disturb it little; the server's own part of it; the
memory that the process had at most.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from fedlens.algorithm import Algorithm
from fedlens.client import ClientProgram
from fedlens.engines import Engine, Sequential
from fedlens.federation import Federation, Fixed, Holdings
from fedlens.models import MODELS
from fedlens.network.network import Network
from fedlens.pieces import Epochs, Sgd, Uniformly
from fedlens.rounds import begin, run_round
from fedlens.runs.bench import Idle, Workload, examples

POOL = Workload("lenet5", (1, 28, 28), clients=100, steps=5, batch=10)
HELD = POOL.steps * POOL.batch


def federation(num_clients: int) -> Federation:
    pool = examples(POOL)
    rng = torch.Generator().manual_seed(0)
    index = torch.randint(len(pool), (num_clients * HELD,), generator=rng)
    offsets = torch.arange(num_clients + 1) * HELD
    return Federation(pool, 10, Fixed(Holdings(index, offsets)))


def measure(num_clients: int, cohort: int, rounds: int) -> dict[str, float]:
    """One configuration, in this process."""
    torch.set_num_threads(1)
    clients = federation(num_clients)
    network = Network(MODELS[POOL.model](POOL.shape, 10), (0.5,), (0.5,))
    algorithm = Algorithm(Uniformly(cohort), Epochs(1, POOL.batch), solve=Sgd(0.05))
    program = ClientProgram(algorithm, network.layout)

    def one_round(engine: Engine) -> Callable[[], float]:
        state = begin(network, program, clients, torch.device("cpu"))

        def run() -> float:
            nonlocal state
            start = time.process_time()
            state, _ = run_round(program, clients, engine, state, seed=0)
            return time.process_time() - start

        run(), run()
        return run

    whole, alone = one_round(Sequential(network, clients.examples)), one_round(Idle(network))
    return {
        "seconds": statistics.median(whole() for _ in range(rounds)),
        "server_seconds": statistics.median(alone() for _ in range(rounds)),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def elsewhere(num_clients: int, cohort: int, rounds: int) -> dict[str, float]:
    """The same in a process of its own."""
    words = ["--one", str(num_clients), str(cohort), "--rounds", str(rounds)]
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
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.one:
        num_clients, cohort = arguments.one
        print(json.dumps(measure(num_clients, cohort, arguments.rounds)))
        return
    cases = [(clients, 10) for clients in arguments.clients]
    cases += [(1_000, cohort) for cohort in arguments.cohorts if (1_000, cohort) not in cases]
    found: dict[tuple[int, int], list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(arguments.repeats):
        for case in cases:
            print(f"repeat {repeat + 1}: {case[0]:,} clients", file=sys.stderr, flush=True)
            found[case].append(elsewhere(*case, arguments.rounds))
    rows = [
        {"clients": case[0], "cohort": case[1]}
        | {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for case, runs in found.items()
    ]
    about = {"torch": torch.__version__, "repeats": arguments.repeats, "rounds": arguments.rounds}
    if arguments.json:
        print(json.dumps({**about, "rows": rows}))
        return
    print(f"torch {torch.__version__}, median of {arguments.repeats} x {arguments.rounds} rounds")
    for row in rows:
        print(
            f"{row['clients']:>10,} clients, {row['cohort']:>4} a round   "
            f"{1e3 * row['seconds']:8.2f} ms CPU   server {1e3 * row['server_seconds']:6.2f} ms   "
            f"{row['peak_memory_bytes'] / 2**20:6.0f} MiB"
        )


if __name__ == "__main__":
    main()
