"""How long is a round? Engines beside a training loop written by hand, on one device, in one run.

    python benchmarks/rounds.py [--device cuda] [--repeats 3] [--rounds 20] [--only pfl-cnn ...]

The workloads are those of `fedlens bench`. It prints the median of the repeats in milliseconds per
round, and how many times faster than the loop that is.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable

import torch

from fedlens.models import MODELS
from fedlens.runs.bench import WORKLOADS, experiment, rounds, time_of
from fedlens.runs.loop import torch_settings
from fedlens.setup import build
from sequential_loop import by_hand

ON_GPU = [("by hand", "tf32"), ("sequential", "tf32"), ("stacked", "tf32"), ("stacked", "bf16")]
ON_CPU = [("by hand", "fp32"), ("sequential", "fp32"), ("processes", "fp32")]


def loop(name: str, device: torch.device) -> Callable[[], None]:
    work = WORKLOADS[name]
    images = torch.randn(work.samples, *work.shape, device=device)
    labels = torch.randint(10, (work.samples,), device=device)
    everyone = torch.arange(work.samples, device=device)
    members = list(torch.split(everyone, work.steps * work.batch))
    module = MODELS[work.model](work.shape, 10, **work.options).to(device)
    return by_hand(module, images, labels, members, work.batch)


def milliseconds(
    name: str, engine: str, precision: str, device: torch.device, count: int, repeats: int
) -> float:
    kind = "auto" if engine == "by hand" else engine
    setup = build(experiment(WORKLOADS[name], kind, str(device), precision))
    with torch_settings(setup.experiment, device):
        one_round = loop(name, device) if engine == "by hand" else rounds(setup)
        time_of(one_round, 4 if device.type == "cuda" else 1, device)
        times = [time_of(one_round, count, device) for _ in range(repeats)]
    setup.engine.close()
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    rows = []
    for name in arguments.only or WORKLOADS:
        work = WORKLOADS[name]
        taken: dict[str, float] = {}
        for engine, precision in ON_GPU if on_gpu else ON_CPU:
            count = arguments.rounds if engine == "stacked" else max(arguments.rounds // 10, 1)
            count = count if on_gpu else 1
            measured = milliseconds(name, engine, precision, device, count, arguments.repeats)
            taken[f"{engine} {precision}"] = measured
        label = f"{name} {work.clients} x {work.steps} x {work.batch}"
        rows.append({"workload": label, "milliseconds": taken})
        if not arguments.json:
            by = next(iter(taken.values()))
            shown = "  ".join(f"{k} {v:.1f} ({by / v:.2f}x)" for k, v in taken.items())
            print(f"{label:<26} {shown}", flush=True)
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, CPU"
    about = {"machine": machine, "torch": torch.__version__, "repeats": arguments.repeats}
    print(json.dumps({**about, "rows": rows}) if arguments.json else about)


if __name__ == "__main__":
    main()
