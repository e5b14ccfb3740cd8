"""What does an algorithm's round cost beside FedAvg's?

    python benchmarks/algorithms.py [--device cuda] [--precision bf16] [--only hsu-cnn ...]

The workloads are those of `fedlens bench`. FedAvg and the algorithms take turns in one process. It
prints the median of the repeats in milliseconds per round, and the ratio to FedAvg.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from typing import Any

import torch

from fedlens.config.experiment import Named
from fedlens.runs.bench import WORKLOADS, Workload, experiment, rounds, time_of
from fedlens.runs.loop import torch_settings
from fedlens.setup import build


def algorithms(work: Workload) -> dict[str, tuple[Named, ...]]:
    virtual = {"size": work.steps * work.batch}
    return {
        "fedavg": (Named("fedavg"),),
        "fedprox": (Named("fedprox", {"mu": 0.01}),),
        "fedavgm": (Named("fedavgm"),),
        "fedir": (Named("fedir"),),
        "fedvc": (Named("fedvc", virtual),),
        "fedns": (Named("fedns"),),
        "fedadmm": (Named("fedadmm"),),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--precision", default="bf16" if on_gpu else "fp32")
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device, found = torch.device(arguments.device), []
    for name in arguments.only or ("hsu-cnn", "mcmahan-cnn"):
        base = experiment(WORKLOADS[name], "auto", arguments.device, arguments.precision)
        runs: dict[str, Any] = {}
        for which, amendments in algorithms(WORKLOADS[name]).items():
            setup = build(replace(base, algorithm=amendments))
            runs[which] = setup, rounds(setup)
        times: dict[str, list[float]] = {which: [] for which in runs}
        with torch_settings(base, device):
            for _, one_round in runs.values():
                time_of(one_round, 6 if device.type == "cuda" else 1, device)
            for _ in range(arguments.repeats):
                for which, (_, one_round) in runs.items():
                    times[which].append(1e3 * time_of(one_round, arguments.rounds, device))
        for setup, _ in runs.values():
            setup.engine.close()
        medians = {which: statistics.median(values) for which, values in times.items()}
        ratios = {which: value / medians["fedavg"] for which, value in medians.items()}
        found.append({"workload": name, "milliseconds": medians, "ratio": ratios})
        if not arguments.json:
            shown = (f"{which} {medians[which]:.2f} ({ratios[which]:.2f}x)" for which in medians)
            print(f"{name}: " + ", ".join(shown), flush=True)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
