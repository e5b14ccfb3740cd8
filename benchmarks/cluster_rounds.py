"""How long a round takes on a cluster: a formula, and a simulation that checks it.

    python benchmarks/cluster_rounds.py           # a table, from one node to a hundred
    python benchmarks/cluster_rounds.py measure [STEPS]   # on this machine: overhead, two workers

Clients of hsu-cnn take STEPS steps, 1 by default; the workload of `fedlens bench` has 8.

The simulation goes through a round task by task. The server's link carries the model once to each
node. The server hands out tasks, the longest first, to the next free worker. Results cross the link
one after another, and the server adds them up one after another. The formula (`on_paper`) estimates
the same with four terms.
"""

from __future__ import annotations

import heapq
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from fedlens.engines.workers import tasks_a_worker


@dataclass(frozen=True)
class Cluster:
    nodes: int
    workers: int = 16  # per node
    clients: int = 1_000  # per round
    seconds: float = 0.5  # of a client, on average
    spread: float = 0.5  # standard deviation of a client's seconds, as a share of the average
    parameters: int = 1_756_426  # hsu-cnn
    link: float = 1.25e9  # bytes per second that the server sends or receives: 10 Gbit
    add: float = 4e9  # bytes per second that the server adds up
    task: float = 0.001  # seconds of the server per task, to write it and hand it out
    once: float = 0.010  # other seconds per round

    @property
    def down(self) -> float:  # parameters in float32
        return 4.0 * self.parameters

    @property
    def up(self) -> float:  # a sum in float64
        return 8.0 * self.parameters

    @property
    def tasks(self) -> int:
        """The number of tasks of a round. Each has the same power of two of clients."""
        workers = self.nodes * self.workers
        wanted = tasks_a_worker(workers) * workers
        size = 1
        while self.clients / (2 * size) >= wanted:
            size *= 2
        return -(-self.clients // size)


def on_paper(cluster: Cluster) -> float:
    """Seconds of a round, by formula.

    The sum of the fixed time, the longest of three activities that overlap (sending the model and
    training; handing out tasks; receiving and adding up results), the wait for the last task, and
    receiving and adding up its result.
    """
    workers = min(cluster.nodes * cluster.workers, cluster.tasks)
    size = cluster.clients / cluster.tasks
    send = cluster.nodes * cluster.down / cluster.link
    train = cluster.clients * cluster.seconds / workers
    hand_out = cluster.tasks * cluster.task
    bring_back = cluster.tasks * max(cluster.up / cluster.link, cluster.up / cluster.add)
    last = cluster.seconds * size / 2 if cluster.tasks > workers else 0.0
    end = cluster.up / cluster.link + cluster.up / cluster.add
    return cluster.once + max(send + train, hand_out, bring_back) + last + end


def simulated(cluster: Cluster, seed: int = 0) -> float:
    """Seconds of a round, simulated task by task."""
    rng = random.Random(seed)
    size = -(-cluster.clients // cluster.tasks)
    shape = 1 / cluster.spread**2
    lasts = []
    for first in range(0, cluster.clients, size):
        clients = range(first, min(first + size, cluster.clients))
        lasts.append(sum(rng.gammavariate(shape, cluster.seconds / shape) for _ in clients))
    lasts.sort(reverse=True)
    # A node's workers start when the model has arrived; the nodes receive it one after another.
    free = [
        cluster.once + (node + 1) * cluster.down / cluster.link
        for node in range(cluster.nodes)
        for _ in range(cluster.workers)
    ]
    heapq.heapify(free)
    server = cluster.once
    ends = []
    for seconds in lasts:
        server += cluster.task
        begin = max(heapq.heappop(free), server)
        heapq.heappush(free, begin + seconds)
        ends.append(begin + seconds)
    link = added = 0.0
    for end in sorted(ends):
        link = max(link, end) + cluster.up / cluster.link
        added = max(added, link) + cluster.up / cluster.add
    return added


def table() -> None:
    print("nodes  clients a round   tasks   on paper   simulated   at once, of what could be")
    for clients in (1_000, 10_000, 100_000):
        for nodes in (1, 3, 10, 30, 100):
            one = Cluster(nodes, clients=clients)
            paper, played = on_paper(one), simulated(one)
            ideal = clients * one.seconds / (nodes * one.workers)
            print(
                f"{nodes:5d}  {clients:15,d}  {one.tasks:6,d}  {paper:7.2f} s  {played:8.2f} s"
                f"   {ideal / played:5.0%}"
            )


def measure(steps: int = 1) -> None:
    """Measure the overhead of a round on this machine, with one worker and with two."""
    import os

    from fedlens.config.experiment import Experiment, LocalTraining, Named
    from fedlens.engines import Processes, Ray
    from fedlens.engines.workers import WorkerEngine
    from fedlens.rounds import begin, run_round
    from fedlens.runs.bench import WORKLOADS, experiment
    from fedlens.setup import build

    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    tiny = Experiment(
        Named("fashion-mnist-mini"),
        Named("linear"),
        rounds=1,
        device="cpu",
        local=LocalTraining(max_steps=1),
    )
    hsu = experiment(WORKLOADS["hsu-cnn"], "processes", "cpu", "fp32")
    hsu = replace(hsu, local=replace(hsu.local, max_steps=steps))
    for name, described, rounds in (("linear", tiny, 100), ("hsu-cnn", hsu, 3)):
        setup = build(replace(described, engine="processes"))
        for kind in (Processes, Ray):
            for workers in (1, 2):
                engine: WorkerEngine[Any] = kind(
                    setup.network, setup.federation.examples, workers=workers
                )
                state = begin(setup.network, setup.program, setup.federation, setup.device)
                took, waited, served = [], [], []
                for _ in range(rounds + 2):  # the first two are a warm-up
                    busy, start = engine.busy_seconds, time.perf_counter()
                    cpu = time.process_time()
                    state, _ = run_round(setup.program, setup.federation, engine, state, 0)
                    served.append(time.process_time() - cpu)
                    took.append(time.perf_counter() - start)
                    waited.append(took[-1] - (engine.busy_seconds - busy) / workers)
                engine.close()
                middle = [statistics.median(one[2:]) * 1e3 for one in (took, waited, served)]
                least = [min(one[2:]) * 1e3 for one in (took, waited, served)]
                print(
                    f"{name:8s} {engine.name:10s} {workers} workers: "
                    f"{middle[0]:8.1f} ms a round ({least[0]:.1f} at the least), of which no "
                    f"client trained {middle[1]:6.1f} ({least[1]:.1f}); the server's processor "
                    f"took {middle[2]:6.1f} ({least[2]:.1f})",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(*map(int, sys.argv[2:]))
    else:
        table()
        slow = replace(Cluster(100, clients=10_000), link=1.25e8)
        print(f"100 nodes at 1 Gbit, 10,000 clients: {simulated(slow):.2f} s")
