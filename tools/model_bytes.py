"""Print a hash of the final model of every algorithm, on every CPU engine.

    PYTHONPATH=src python tools/model_bytes.py > after.txt    # and so in another checkout

After a refactoring, the files of both checkouts must be equal. Each line has the first digits of
the sha256 sum of `model.safetensors`, the engine and the algorithm.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import fedlens as fl
from fedlens.algorithms import ALGORITHMS

ENGINES = ("sequential", "stacked", "processes")
NEEDED: dict[str, dict[str, Any]] = {
    "liadmm": {"gamma": 0.1},
    "celiadmm": {"gamma": 0.1},
    "fedvc": {"size": 20},
    "bulyan": {"byzantine": 0},
}
PLAIN = {"scaffold", "liadmm", "celiadmm", "fedcm", "pfedme"}  # these algorithms take no momentum
COMBINED: dict[str, list[Any]] = {
    "fedvc + fedir + fedavgm": [{"name": "fedvc", "size": 20}, "fedir", "fedavgm"],
    "fedprox by size, uneven": [{"name": "fedprox", "sampling": "by-size", "uneven": 0.5}],
    "fedprox with inexactness": [{"name": "fedprox", "mu": 0.1, "inexactness": True}],
    "liadmm, trained": [{"name": "liadmm", "gamma": 0.1, "local": "training", "dual": "epoch"}],
    "fednova + fedprox": ["fednova", "fedprox"],
    "fednova + fedavgm": ["fednova", "fedavgm"],
    "scaffold + fedadam": ["scaffold", "fedadam"],
    "lastfc + fedprox": ["lastfc", "fedprox"],
    "fedadmm + fedir": ["fedadmm", "fedir"],
}


def experiment(engine: str, algorithm: list[Any], **local: Any) -> fl.Experiment:
    local = {"epochs": 2, "batch_size": 10, "lr": 0.05, **local}
    return fl.Experiment.of(
        {
            "dataset": "fashion-mnist-mini",
            "model": "lenet5",
            "rounds": 2,
            "engine": engine,
            "device": "cpu",
            "clients": {
                "count": 200,
                "per_round": 5,
                "partition": {"name": "dirichlet-per-class", "alpha": 1.0},
            },
            "local": local,
            "algorithm": algorithm,
            "evaluate": {"every": 2},
        }
    )


def digest(experiment: fl.Experiment) -> str:
    with tempfile.TemporaryDirectory() as place:
        fl.run(experiment, out=Path(place) / "run")
        content = (Path(place) / "run" / "model.safetensors").read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> None:
    for engine in ENGINES:
        for name in ALGORITHMS:
            momentum = {} if name in PLAIN else {"momentum": 0.5, "weight_decay": 1e-3}
            for local in ({}, momentum) if momentum else ({},):
                made = experiment(engine, [{"name": name, **NEEDED.get(name, {})}], **local)
                print(digest(made), engine, name, *local, flush=True)
        for name, algorithm in COMBINED.items():
            print(digest(experiment(engine, algorithm)), engine, name, flush=True)
        kept = experiment(engine, ["fedavg"], momentum=0.5, reset=False)
        print(digest(kept), engine, "momentum kept", flush=True)


if __name__ == "__main__":
    main()
