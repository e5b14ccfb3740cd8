"""Does fedadmm hold where FedAvg swings and LIADMM fails? Paper 4's setting on Fashion-MNIST.

    python benchmarks/two_class_clients.py [--data DIR] [--seeds 3] [--rounds 80] [--only NAME ...]

100 clients, 10 per round, 10 local epochs of batches of 128, mcmahan-cnn. For every case and seed
it prints the mean and the standard deviation of test accuracy over the last quarter of the rounds
(61 to 80). All run at the same time, one process for each case and seed; a GPU is advised.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from origin import origin

TWO_CLASSES = {"name": "classes", "per_client": 2}
LOGITS = {"lr": 0.01, "momentum": 0.9}
PAPER = {"lr": 0.05, "momentum": 0.9}
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"local": LOGITS},
    "fedadmm": {"local": LOGITS, "algorithm": "fedadmm"},
    "fedavg, lr 0.05": {"local": PAPER},
    "fedadmm, lr 0.05": {"local": PAPER, "algorithm": "fedadmm"},
    "fedavg, double softmax": {"local": PAPER, "loss": "double_softmax"},
    "fedavg, double softmax, iid": {
        "local": PAPER,
        "loss": "double_softmax",
        "partition": "iid",
    },
    "liadmm, double softmax": {
        "local": PAPER,
        "loss": "double_softmax",
        "algorithm": {"name": "liadmm", "local": "training", "dual": "step", "average": "sampled"},
    },
}
SEEDED = ("fedavg", "fedadmm")  # these run with all seeds, the others with one


def run_case(name: str, seed: int, rounds: int, data: str | None) -> dict[str, Any]:
    import fedlens as fl

    case = CASES[name]
    clients = {"count": 100, "per_round": 10, "partition": case.get("partition", TWO_CLASSES)}
    content = {
        "dataset": "fashion-mnist",
        "model": "mcmahan-cnn",
        "rounds": rounds,
        "seed": seed,
        "loss": case.get("loss", "cross_entropy"),
        "clients": clients,
        "local": {"epochs": 10, "batch_size": 128, **case["local"]},
        "algorithm": case.get("algorithm", "fedavg"),
        "precision": "tf32",
    }
    experiment = fl.Experiment.of(content)
    start = time.perf_counter()
    result = fl.run(experiment, data=data)
    accuracies = [record.get("test_accuracy") for record in result.records]
    last = [a for a in accuracies[-rounds // 4 :] if a is not None]
    identity = [
        abs(r["test_loss"] - (1.4612 + 1 - r["test_accuracy"]))
        for r in result.records[20:]
        if "test_loss" in r
    ]
    return {
        "case": name,
        "seed": seed,
        "status": result.status,
        "mean": statistics.fmean(last) if last else None,
        "std": statistics.pstdev(last) if last else None,
        "loss_identity_off_by": max(identity) if identity else None,
        "accuracy": accuracies,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, seed = arguments.one
        print(json.dumps(run_case(name, int(seed), arguments.rounds, arguments.data)))
        return
    jobs = []
    for name in arguments.only or CASES:
        for seed in range(arguments.seeds if name in SEEDED else 1):
            command = [sys.executable, __file__, "--rounds", str(arguments.rounds)]
            command += ["--one", name, str(seed)]
            command += ["--data", arguments.data] if arguments.data else []
            alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # many processes share the cores
            jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=alone))
    rows = []
    for job in jobs:
        output, _ = job.communicate()
        if job.returncode:
            print(f"failed: {job.args!r}", file=sys.stderr)
            continue
        rows.append(json.loads(output.splitlines()[-1]))
        row = rows[-1]
        shown = "-" if row["mean"] is None else f"{row['mean']:.4f} ({row['std']:.4f})"
        print(
            f"{row['case']:<30} seed {row['seed']}  {shown}  {row['status']}, "
            f"{row['seconds']:.0f} s",
            flush=True,
        )
        if arguments.out:
            arguments.out.write_text(json.dumps({**origin(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
