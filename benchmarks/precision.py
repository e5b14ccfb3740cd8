"""Does bfloat16 cost accuracy? The same runs in fp32, tf32 and bf16, seed by seed.

    python benchmarks/precision.py [--data DIR] [--seeds 5] [--rounds 100] [--precisions fp32 bf16]

Fashion-MNIST, mcmahan-cnn, 100 clients, 10 per round, one local epoch of batches of 32; iid, and
with Dirichlet(1) clients. It prints the mean and the standard deviation of the final test accuracy,
and the mean difference from the first precision over the seeds with its standard error. Each final
model is also evaluated in every precision: it prints the accuracies of the same weights on the same
images, and their largest difference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import fedlens as fl
from fedlens.core import Tree
from fedlens.evaluation.evaluate import evaluate
from fedlens.evaluation.metrics import metrics
from fedlens.rounds import begin
from fedlens.runs.loop import torch_settings
from fedlens.setup import build
from origin import origin

Precision = Literal["fp32", "tf32", "bf16"]
PARTITIONS = {"iid": fl.Named("iid"), "dirichlet": fl.Named("dirichlet", {"alpha": 1.0})}


def experiment(partition: str, precision: Precision, seed: int, rounds: int) -> fl.Experiment:
    return fl.Experiment(
        dataset=fl.Named("fashion-mnist"),
        model=fl.Named("mcmahan-cnn"),
        rounds=rounds,
        seed=seed,
        clients=fl.Clients(count=100, per_round=10, partition=PARTITIONS[partition]),
        local=fl.LocalTraining(epochs=1, batch_size=32, lr=0.05),
        evaluate=fl.Evaluate(every=rounds),
        precision=precision,
    )


def judged(described: fl.Experiment, model: Tree, data: Path | None) -> float:
    """The test accuracy of a model, in the precision and on the engine of this experiment."""
    setup = build(described, data)
    with torch_settings(setup.experiment, setup.device, setup.threads):
        state = begin(setup.network, setup.program, setup.federation, setup.device)
        here = {name: t.to(setup.device) for name, t in model.items()}
        params = {name: here[name] for name in state.params}
        buffers = {name: here[name] for name in state.buffers}
        state = replace(state, params=params, buffers=buffers)
        loss, test = setup.program.algorithm.objective.loss, setup.parts["test"]
        found = metrics(evaluate(setup.engine, state, test, setup.dataset.num_classes, loss))
    setup.engine.close()
    return found["accuracy"]


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--precisions", nargs="+", default=get_args(Precision))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    rejudged: dict[str, dict[str, list[float]]] = {}
    for partition in PARTITIONS:
        found[partition] = {}
        for precision in arguments.precisions:
            values, others = [], {other: list[float]() for other in arguments.precisions}
            for seed in range(arguments.seeds):
                one = experiment(partition, precision, seed, arguments.rounds)
                result = fl.run(one, data=arguments.data)
                values.append(result.final["test_accuracy"])
                for other in arguments.precisions:
                    described = replace(one, precision=other)
                    others[other].append(judged(described, result.model, arguments.data))
            found[partition][precision] = values
            rejudged[f"{partition}, trained in {precision}"] = others
            pairs = zip(values, found[partition][arguments.precisions[0]], strict=True)
            apart = [a - b for a, b in pairs]
            print(
                f"{partition:<10} {precision}  {statistics.fmean(values):.4f} "
                f"({spread(values):.4f})  minus {arguments.precisions[0]} "
                f"{statistics.fmean(apart):+.4f} ({spread(apart) / math.sqrt(len(apart)):.4f})",
                flush=True,
            )
            widest = max(max(same) - min(same) for same in zip(*others.values(), strict=True))
            means = ", ".join(f"{k} {statistics.fmean(v):.4f}" for k, v in others.items())
            print(
                f"           the same models judged in {means}: apart by {widest:.4f} at the most"
            )
    if arguments.out:
        content = {**origin(), "accuracy": found, "judged": rejudged}
        arguments.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
