"""A small experiment, and what a run of it records."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedlens as fl
from fedlens.runs.records import Record

OF_TRAINING = {
    "round",
    "seconds",
    "train_loss",
    "batches",
    "batches_total",
    "examples",
    "clients",
    "bytes_up",
    "bytes_down",
}
MEASURES = {"accuracy", "loss", "top5", "precision", "recall", "f1", "classes_predicted"}
SPREAD = {
    f"client_accuracy_{key}"
    for key in ("mean", "std", "min", "p10", "median", "max", "worst_decile", "jain", "weighted")
}


def of(part: str) -> set[str]:
    return {f"{part}_{measure}" for measure in MEASURES}


EVALUATED = OF_TRAINING | {"evaluation_seconds"}


def toy(num_examples: int = 60, num_classes: int = 3, seed: int = 0) -> fl.Dataset:
    """Noisy images of 2x6x6 whose brightness is their label."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_examples) % num_classes
    images = torch.randn(num_examples, 2, 6, 6, generator=rng) + labels.view(-1, 1, 1, 1)
    test = fl.Examples(images[:30] + 0.1, labels[:30])
    return fl.Dataset("toy", fl.Examples(images, labels), test, tuple("abcdef"[:num_classes]))


def normed() -> nn.Sequential:
    """A small network with batch normalisation, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(64, 3))


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": toy(), "model": normed(), "rounds": 3}
    plain |= {"engine": "sequential", "clients": fl.Clients(count=5, per_round=2)}
    return fl.Experiment(**plain | changes)


def lines(folder: Path) -> list[Record]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
