"""A loss that fails as a file `fault` in the site's own folder says: code of a site's own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from fedlens.algorithm.pieces.losses import cross_entropy

NAME = "tests.fleet.failing:loss"


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    file = Path(os.environ.get("FLWR_HOME", "")).parent / "fault"
    fault = file.read_text() if file.is_file() else ""
    if fault == "raised":
        raise RuntimeError("no more")
    if fault == "dropped":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "late":
        time.sleep(600)
    scale = {"nan": float("nan"), "huge": 1e9}.get(fault, 1.0)
    return cross_entropy(logits, labels) * scale
