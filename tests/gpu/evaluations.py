"""On a GPU: evaluations beside the next round count what they count in line with it.

    PYTHONPATH=src:. python tests/gpu/evaluations.py [DEVICE]

Plain Python with torch and numpy. Two experiments train side by side and are evaluated after every
round, on all parts and client by client, with a measure of logits; then again with each evaluation
in line. All records are equal to the last bit, or it ends with status 1. DEVICE is `cuda` unless
another is named (`cpu`).
"""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import fedlens as fl
from fedlens.evaluation import evaluate
from fedlens.runs.records import Record
from fedlens.runs.result import Result
from fedlens.runs.sweep import prepare


def points(device: str) -> dict[str, fl.Experiment]:
    one = fl.Experiment(
        dataset=fl.Named("fashion-mnist-mini"),
        model=fl.Named("mcmahan-cnn"),
        rounds=30,
        device=device,
        engine="stacked",
        deterministic=True,
        clients=fl.Clients(count=20, per_round=5, partition=fl.Named("iid"), holdout=0.2),
        local=fl.LocalTraining(epochs=1, batch_size=10, lr=0.05),
        evaluate=fl.Evaluate(on=("test", "train"), metrics=(fl.Named("ece"),), bootstrap=20),
    )
    return {f"seed {seed}": replace(one, seed=seed) for seed in (0, 1)}


def records(results: Mapping[str, Result]) -> dict[str, list[Record]]:
    """All but what differs from one run to the next."""
    return {
        name: [{k: v for k, v in one.items() if "seconds" not in k} for one in result.records]
        for name, result in results.items()
    }


def main(device: str = "cuda") -> None:
    beside = records(prepare(points(device)).run())
    with mock.patch.object(evaluate, "aside", lambda _: nullcontext()):
        in_line = records(prepare(points(device)).run())
    last = next(iter(beside.values()))[-1]
    print(f"accuracy {last['test_accuracy']:.4f}, with {len(last)} numbers a round")
    print("all equal" if beside == in_line else "evaluations differ")
    sys.exit(beside != in_line)


if __name__ == "__main__":
    main(*sys.argv[1:])
