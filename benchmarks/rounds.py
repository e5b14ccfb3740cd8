"""How long is a round? Engines beside a training loop written by hand, on one device, in one run.

    python benchmarks/rounds.py [--device cuda] [--repeats 3] [--rounds 20] [--only pfl-cnn ...]

Client work on random images that lie on the device: choosing clients, plans, weighing, combining
and advancing are included, evaluation is not. Printed is the median of the repeats, in
milliseconds a round, and the ratio to the loop's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fedlens.algorithm import Algorithm
from fedlens.client import ClientProgram
from fedlens.core import Examples, Federation, Fixed, Holdings
from fedlens.engines import Sequential, Stacked
from fedlens.models import MODELS
from fedlens.network import Network
from fedlens.pieces import Epochs, Sgd, Uniformly
from fedlens.rounds import begin, run_round
from sequential_loop import by_hand

WORKLOADS: dict[str, tuple[dict[str, Any], tuple[int, int, int], int, int, int]] = {
    "pfl-cnn": ({}, (3, 32, 32), 50, 5, 10),
    "hsu-cnn": ({"padding": "same"}, (3, 32, 32), 10, 8, 64),
    "mcmahan-cnn": ({}, (1, 28, 28), 10, 60, 10),
}
PRECISIONS = {"tf32": torch.float32, "bf16": torch.bfloat16}


def one_round(
    name: str, engine: str, precision: str, device: torch.device, population: int = 4
) -> Callable[[], None]:
    options, shape, clients, steps, batch = WORKLOADS[name]
    torch.manual_seed(0)
    count = population * clients * steps * batch
    images = torch.randint(256, (count, *shape), dtype=torch.uint8, device=device)
    labels = torch.randint(10, (count,), device=device)
    members = list(torch.arange(count).split(steps * batch))
    module = MODELS[name](shape, 10, **options)
    if engine == "by hand":
        floats = (images.float() / 255 - 0.5) / 0.25
        mine = [m.to(device) for m in members[:clients]]
        return by_hand(module.to(device), floats, labels, mine, batch)
    channels = shape[0]
    network = Network(module, (0.5,) * channels, (0.25,) * channels, compute=PRECISIONS[precision])
    examples = Examples(images.contiguous(memory_format=torch.channels_last), labels)
    federation = Federation(examples, 10, Fixed(Holdings.of(members)))
    algorithm = Algorithm(Uniformly(clients), Epochs(1, batch), solve=Sgd(0.1))
    program = ClientProgram(algorithm, network.layout)
    made = {"sequential": Sequential, "stacked": Stacked}[engine](network, examples)
    state = begin(network, program, federation, device)

    def work() -> None:
        nonlocal state
        state, _ = run_round(program, federation, made, state, seed=0)

    return work


def milliseconds(work: Callable[[], None], rounds: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.set_num_threads(1)  # as `fedlens run` does
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    engines = [
        ("by hand", "tf32"),
        ("sequential", "tf32"),
        ("stacked", "tf32"),
        ("stacked", "bf16"),
    ]
    rows = []
    for name in arguments.only or WORKLOADS:
        _, _, clients, steps, batch = WORKLOADS[name]
        taken: dict[str, float] = {}
        for engine, precision in engines:
            work = one_round(name, engine, precision, device)
            rounds = arguments.rounds if engine == "stacked" else max(arguments.rounds // 10, 1)
            milliseconds(work, 4, device)
            times = [milliseconds(work, rounds, device) for _ in range(arguments.repeats)]
            taken[f"{engine} {precision}"] = statistics.median(times)
        rows.append({"workload": f"{name} {clients} x {steps} x {batch}", "milliseconds": taken})
        if not arguments.json:
            loop = taken["by hand tf32"]
            shown = "  ".join(f"{k} {v:.1f} ({loop / v:.1f}x)" for k, v in taken.items())
            print(f"{rows[-1]['workload']:<26} {shown}", flush=True)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    about = {"machine": machine, "torch": torch.__version__, "repeats": arguments.repeats}
    print(json.dumps({**about, "rows": rows}) if arguments.json else about)


if __name__ == "__main__":
    main()
