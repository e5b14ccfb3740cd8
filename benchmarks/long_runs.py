"""Whole runs on CIFAR-10, as others publish them: seconds from the first round to the last.

    python benchmarks/long_runs.py [pfl | hsu] [--data DIR] [--rounds N] [--seeds 1]

`pfl` is the benchmark of pfl-research: 1,000 clients of 50 images, 50 per round, one epoch of
batches of 10 at lr 0.1, the unweighted mean, 1,500 rounds, an evaluation every 10. `hsu` is that of
Hsu et al.: 100 clients of 500 images, Dirichlet(1), 10 per round, one epoch of batches of 64,
10,000 rounds, an evaluation every 100. A short run with the same settings comes first, so that
start-up is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import torch

import fedlens as fl

RUNS: dict[str, dict[str, Any]] = {
    "pfl": {
        "model": "pfl-cnn",
        "rounds": 1500,
        "clients": {"count": 1000, "per_round": 50, "partition": "iid"},
        "local": {"batch_size": 10, "lr": 0.1},
        "evaluate": {"every": 10},
    },
    "hsu": {
        "model": {"name": "hsu-cnn", "padding": "same"},
        "rounds": 10_000,
        "clients": {
            "count": 100,
            "per_round": 10,
            "partition": {"name": "dirichlet", "alpha": 1.0},
        },
        "local": {"batch_size": 64, "lr": 0.03},
        "evaluate": {"every": 100},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(RUNS))
    parser.add_argument("--data")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    arguments = parser.parse_args()
    settings = RUNS[arguments.name] | {"dataset": "cifar10", "precision": arguments.precision}
    whole = fl.Experiment(**settings)
    whole = replace(whole, rounds=arguments.rounds or whole.rounds)
    begun = time.perf_counter()
    fl.run(replace(whole, rounds=10), data=arguments.data)
    print(f"start-up {time.perf_counter() - begun:.1f} s", flush=True)
    for seed in range(arguments.seeds):
        result = fl.run(replace(whole, seed=seed), data=arguments.data)
        seconds = result.summary["seconds"]
        row = {"run": arguments.name, "seed": seed, "rounds": len(result.records), **seconds}
        print(json.dumps(row | {"test_accuracy": result.final["test_accuracy"]}), flush=True)


if __name__ == "__main__":
    main()
