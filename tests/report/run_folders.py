"""Run folders as a run leaves them, made without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

EXPERIMENT = """\
dataset = "fashion-mnist"
model = "mcmahan-cnn"
rounds = {rounds}
seed = {seed}

[clients]
count = 100
per_round = 10
partition = {{ name = "dirichlet", alpha = {alpha} }}

[local]
epochs = 1
batch_size = 32
lr = 0.05

[server]
lr = 1.0

{algorithm}
"""

ALGORITHMS = {
    "fedavg": "",
    "fedavgm": '[[algorithm]]\nname = "fedavgm"\nmomentum = 0.9\n',
    "fedprox": '[[algorithm]]\nname = "fedprox"\nmu = 0.01\n',
}


def make_run(
    folder: Path,
    *,
    algorithm: str = "fedavg",
    rounds: int = 40,
    planned: int | None = None,
    top: float = 0.8,
    every: int = 2,
    spread: bool = False,
    extra: tuple[str, ...] = (),
    status: str = "finished",
    seed: int = 1,
    alpha: float = 0.3,
) -> Path:
    """A run whose accuracy grows towards `top`, evaluated `every` few rounds (0: never)."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    if every:
        lines.append({"round": 0, "test_accuracy": 0.1, "test_loss": 2.303})
    for round in range(1, rounds + 1):
        wave = math.sin(2.1 * round + 7 * top + seed) / (8 + round)
        reached = top * (1 - math.exp(-round / 9)) + 0.1 * math.exp(-round / 9) + 0.3 * wave
        line: dict[str, Any] = {
            "round": round,
            "seconds": 1.25,
            "train_loss": 2.4 * (1 - reached) + 0.3 * wave,
            "batches": 190,
            "bytes_up": 66_534_800,
            "bytes_down": 66_534_800,
        }
        if every and round % every == 0:
            for part in ("test", *extra):
                better = 0.04 if part == "train" else 0.0
                line |= {
                    f"{part}_accuracy": reached + better,
                    f"{part}_top5": min(1.0, reached + 0.15),
                    f"{part}_f1": reached - 0.02,
                }
                if part != "train":
                    line[f"{part}_loss"] = 2.2 * (1 - reached) + 0.1
            if spread:
                places = {"min": -0.3, "p10": -0.15, "median": 0.02, "mean": 0.0, "max": 0.17}
                for word, shift in places.items():
                    line[f"client_accuracy_{word}"] = min(1.0, max(0.0, reached + shift))
        lines.append(line)
    if status == "diverged":
        lines[-1] |= {"train_loss": math.nan, "test_loss": None, "test_accuracy": 0.1}
    write_run(folder, lines, status=status)
    (folder / "experiment.toml").write_text(
        EXPERIMENT.format(
            rounds=planned or rounds, seed=seed, alpha=alpha, algorithm=ALGORITHMS[algorithm]
        )
    )
    return folder


def write_run(folder: Path, lines: list[dict[str, Any]], status: str = "finished") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text('dataset = "digits"\nmodel = "mlp"\nrounds = 3\n')
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = {
        "fedlens": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "device": "cpu (2 cores)",
        "seed": 1,
        "partition": "9f2c41d07be1a8c3",
        "parameters": 1_663_370,
        "revision": "0123abc",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    judged = [line for line in lines if "test_accuracy" in line]
    summary: dict[str, Any] = {
        "status": status,
        "rounds": max((line["round"] for line in lines), default=0),
        "final": {k: v for k, v in judged[-1].items() if k.startswith("test_")} if judged else {},
        "best": {},
        "emd": 0.92,
        "seconds": {"training": 50.0, "evaluation": 6.5, "total": 56.5},
        "bytes_up": sum(line.get("bytes_up", 0) for line in lines),
        "bytes_down": sum(line.get("bytes_down", 0) for line in lines),
        "peak_memory_bytes": 1_412_000_000,
    }
    if judged:
        best = max(judged, key=lambda line: line["test_accuracy"] or 0)
        summary["best"]["test_accuracy"] = {"value": best["test_accuracy"], "round": best["round"]}
    (folder / "summary.json").write_text(json.dumps(summary))
    partition = {"num_clients": 2, "sizes": [30, 20], "label_counts": [[10, 20], [20, 0]]}
    (folder / "partition.json").write_text(json.dumps(partition | {"emd": 0.92}))
