"""Is the sequential engine as fast as a training loop written by hand?

    python benchmarks/sequential_loop.py [--repeats 3] [--json]

Both run the same rounds of FedAvg on the same random images, in turns, in one process. The loop is
what a researcher would write: one module, torch.optim.SGD, images normalised once and kept as
floats. A ratio above 1 means that Fedlens is faster; the median of the repeats is printed.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.core.federation import Examples, Federation, Fixed, Holdings
from fedlens.engines import Sequential
from fedlens.models import MODELS
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram

# model: image shape, clients per round, steps, batch size
WORKLOADS = {
    "pfl-cnn": ((3, 32, 32), 20, 5, 10),
    "hsu-cnn": ((3, 32, 32), 4, 8, 64),
    "mcmahan-cnn": ((1, 28, 28), 4, 60, 10),
    "lenet5": ((1, 28, 28), 20, 5, 20),
}
LR = 0.1


def by_hand(
    module: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    members: list[torch.Tensor],
    batch: int,
) -> Callable[[], None]:
    server = copy.deepcopy(module)

    def one_round() -> None:
        total = {name: torch.zeros_like(p) for name, p in server.named_parameters()}
        for mine in members:
            local = copy.deepcopy(server)
            local.train()
            optimiser = torch.optim.SGD(local.parameters(), lr=LR)
            order = mine[torch.randperm(len(mine))]
            for start in range(0, len(order), batch):
                index = order[start : start + batch]
                optimiser.zero_grad()
                F.cross_entropy(local(images[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            for name, p in local.named_parameters():
                total[name] += p.detach() / len(members)
        with torch.no_grad():
            for name, p in server.named_parameters():
                p.copy_(total[name])

    return one_round


def by_fedlens(
    module: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    members: list[torch.Tensor],
    batch: int,
) -> Callable[[], None]:
    channels = images.shape[1]
    network = Network(module, (0.5,) * channels, (0.25,) * channels)
    examples = Examples(images.contiguous(memory_format=torch.channels_last), labels)
    federation = Federation(examples, 10, Fixed(Holdings.of(members)))
    algorithm = Algorithm(Uniformly(len(members)), Epochs(1, batch), solve=Sgd(LR))
    program = ClientProgram(algorithm, network.layout)
    engine = Sequential(network, examples)
    state = begin(network, program, federation, torch.device("cpu"))

    def one_round() -> None:
        nonlocal state
        state, _ = run_round(program, federation, engine, state, seed=0)

    return one_round


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, repeats: int) -> dict[str, object]:
    shape, clients, steps, batch = WORKLOADS[name]
    torch.manual_seed(0)
    count = clients * steps * batch
    images = torch.randint(256, (count, *shape), dtype=torch.uint8)
    labels = torch.randint(10, (count,))
    members = list(torch.split(torch.arange(count), steps * batch))
    module = MODELS[name](shape, 10)
    floats = (images.float() / 255 - 0.5) / 0.25
    loop = by_hand(module, floats, labels, members, batch)
    ours = by_fedlens(module, images, labels, members, batch)
    loop(), ours()
    pairs = [(seconds(loop), seconds(ours)) for _ in range(repeats)]
    return {
        "workload": f"{name} {clients} x {steps} x {batch}",
        "loop_seconds": statistics.median(a for a, _ in pairs),
        "fedlens_seconds": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(name, arguments.repeats) for name in WORKLOADS]
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if arguments.json:
        print(json.dumps({"machine": machine, "repeats": arguments.repeats, "rows": rows}))
        return
    print(f"{machine}, median of {arguments.repeats}")
    for row in rows:
        print(
            f"{row['workload']:<26} by hand {row['loop_seconds']:.3f} s   "
            f"Fedlens {row['fedlens_seconds']:.3f} s   ratio {row['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
