"""What is gained by running the points of a sweep side by side?

    python benchmarks/sweep.py [--device cuda] [--precision tf32] [--points 42] [--at-once 64]

Points differ in seed and learning rate. A round of points stacked as `fedlens sweep` stacks them
and a round of a single point are timed in turns in one process. It prints the medians of the
repeats, scaled to milliseconds for all points, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable

import torch

from fedlens.engines import Stacked
from fedlens.runs.bench import WORKLOADS, experiment, rounds_together, time_of
from fedlens.runs.grid import grid
from fedlens.runs.loop import torch_settings
from fedlens.runs.points import Point
from fedlens.runs.sweep import prepare


def rounds(points: list[Point], at_once: int) -> Callable[[], None]:
    """A function that runs the next round of all these points together, at each call."""
    setups = [point.setup for point in points]
    engine = Stacked(setups[0].network, setups[0].federation.examples, at_once=at_once)
    return rounds_together(setups, engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="tf32" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--points", type=int, default=42)
    parser.add_argument("--at-once", type=int, default=64, help="clients side by side")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device, rows = torch.device(arguments.device), []
    for name in arguments.only or ("mcmahan-cnn", "hsu-cnn"):
        base = experiment(WORKLOADS[name], "stacked", str(device), arguments.precision)
        lrs = [0.01 * (i + 1) for i in range(arguments.points)]
        made = prepare(grid(base, {"local.lr": lrs}))
        points = [point for stack in made.stacks for point in stack]
        size = max(arguments.at_once // WORKLOADS[name].clients, 1)
        stack, alone = points[:size], points[0]
        with torch_settings(alone.setup.experiment, device):
            runs = {
                "alone": (rounds([alone], arguments.at_once), len(points)),
                "side by side": (rounds(stack, arguments.at_once), len(points) / len(stack)),
            }
            for one_round, _ in runs.values():
                time_of(one_round, 5 if device.type == "cuda" else 1, device)
            times: dict[str, list[float]] = {kind: [] for kind in runs}
            for _ in range(arguments.repeats):
                for kind, (one_round, count) in runs.items():
                    taken = time_of(one_round, arguments.rounds, device)
                    times[kind].append(1e3 * count * taken)
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        ratio = medians["alone"] / medians["side by side"]
        row = {"workload": name, "points": len(points), "stack": len(stack), "ratio": ratio}
        rows.append(row | {"milliseconds": medians})
        if not arguments.json:
            shown = "  ".join(f"{kind} {value:.1f}" for kind, value in medians.items())
            print(f"{name:<12} {len(points)} points by {len(stack)}: {shown}  ratio {ratio:.2f}x")
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    about = {"machine": machine, "torch": torch.__version__, "precision": arguments.precision}
    print(json.dumps({**about, "rows": rows}) if arguments.json else about)


if __name__ == "__main__":
    main()
