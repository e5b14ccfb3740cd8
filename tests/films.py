"""Images with several labels, or none, as X-rays have: a csv file and what it lists."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import fedlens as fl

FINDINGS = ("effusion", "nodule", "pneumonia")
SITES = ("east", "north", "west")
CORNERS = ((0, 0), (0, 12), (12, 0))  # where a finding is seen


def write_films(place: Path, count: int = 90, between: str = ";") -> Path:
    """Films of 24 × 24 pixels below `place`, and films.csv, which is returned."""
    rng, noise = random.Random(0), np.random.default_rng(0)
    rows = [["path", "label", "client"]]
    place.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        found = [name for name, often in zip(FINDINGS, (0.5, 0.4, 0.3), strict=True)
                 if rng.random() < often]  # fmt: skip
        pixels = noise.integers(0, 60, (24, 24), dtype=np.uint8)
        for name in found:
            top, left = CORNERS[FINDINGS.index(name)]
            pixels[top : top + 12, left : left + 12] += 110
        Image.fromarray(pixels).save(place / f"{i}.png")
        rng.shuffle(found)
        rows.append([f"{i}.png", f" {between} ".join(found), SITES[i % 3]])
    with (place / "films.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return place / "films.csv"


LOSS = "binary_cross_entropy"


def corners(count: int = 60) -> fl.Dataset:
    """Images of 8 × 8 whose quarters are bright, one for each of three labels."""
    rng = torch.Generator().manual_seed(0)
    rows = (torch.rand(count, 3, generator=rng) < torch.tensor([0.5, 0.4, 0.2])).long()
    images = torch.randint(60, (count, 1, 8, 8), generator=rng, dtype=torch.uint8)
    for k, (top, left) in enumerate(((0, 0), (0, 4), (4, 0))):
        images[:, 0, top : top + 4, left : left + 4] += (150 * rows[:, k, None, None]).byte()
    cut = count * 2 // 3
    parts = fl.Examples(images[:cut], rows[:cut]), fl.Examples(images[cut:], rows[cut:])
    return fl.Dataset("corners", *parts, ("a", "b", "c"), (0.3,), (0.3,))


def described(**changes: Any) -> fl.Experiment:
    plain: dict[str, Any] = {"dataset": corners(), "model": "linear", "loss": LOSS, "rounds": 3}
    clients = fl.Clients(count=4, per_round=3, holdout=0.2)
    local = fl.LocalTraining(batch_size=4, epochs=2, lr=0.3)
    plain |= {"engine": "sequential", "clients": clients, "local": local}
    return fl.Experiment(**plain | changes)
