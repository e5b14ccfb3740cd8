"""Does bfloat16 cost accuracy? The same runs in fp32, tf32 and bf16, seed by seed, on a GPU.

    python benchmarks/precision.py [--data DIR] [--seeds 5] [--rounds 100]

Fashion-MNIST, mcmahan-cnn, 100 clients, 10 a round, one local epoch of batches of 32; iid, and with
Dirichlet(1) clients. Printed are the mean and the standard deviation of the final test accuracy,
and the mean difference from fp32 over the seeds with its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Literal, get_args

import fedlens as fl
from origin import origin

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS = get_args(Precision)
PARTITIONS = {"iid": fl.Named("iid"), "dirichlet": fl.Named("dirichlet", {"alpha": 1.0})}


def accuracy(
    partition: str, precision: Precision, seed: int, rounds: int, data: str | None
) -> float:
    experiment = fl.Experiment(
        dataset=fl.Named("fashion-mnist"),
        model=fl.Named("mcmahan-cnn"),
        rounds=rounds,
        seed=seed,
        clients=fl.Clients(count=100, per_round=10, partition=PARTITIONS[partition]),
        local=fl.LocalTraining(epochs=1, batch_size=32, lr=0.05),
        evaluate=fl.Evaluate(every=rounds),
        precision=precision,
    )
    return fl.run(experiment, data=data).final["test_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for partition in PARTITIONS:
        found[partition] = {}
        for precision in PRECISIONS:
            values = [
                accuracy(partition, precision, seed, arguments.rounds, arguments.data)
                for seed in range(arguments.seeds)
            ]
            found[partition][precision] = values
            pairs = zip(values, found[partition]["fp32"], strict=True)
            apart = [a - b for a, b in pairs]
            error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
            print(
                f"{partition:<10} {precision}  {statistics.fmean(values):.4f} "
                f"({statistics.stdev(values):.4f})  minus fp32 {statistics.fmean(apart):+.4f} "
                f"({error:.4f})",
                flush=True,
            )
    if arguments.out:
        arguments.out.write_text(json.dumps({**origin(), "accuracy": found}, indent=1))


if __name__ == "__main__":
    main()
