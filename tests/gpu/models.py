"""On a GPU: every built-in network, trained and evaluated by engine `stacked`, two seeds at once.

    PYTHONPATH=src:. python tests/gpu/models.py [DEVICE]

Plain Python with torch and numpy, on images of noise. DEVICE is `cuda` unless another is named
(`cpu`). It prints a line for each network, and ends with status 1 if one failed.
"""

import math
import sys
import time
import traceback
from dataclasses import replace

from fedlens.models import MODELS
from fedlens.runs.bench import Workload, experiment
from fedlens.runs.sweep import prepare

SHAPE = (3, 64, 64)  # the smallest images that every network takes


def train(name: str, device: str) -> str:
    """Two rounds of three clients, with an evaluation after each."""
    one = experiment(Workload(name, SHAPE, 3, 2, 8), "stacked", device, "auto")
    points = {f"seed {seed}": replace(one, rounds=2, seed=seed) for seed in range(2)}
    results = prepare(points).run()
    losses = [result.final["test_loss"] for result in results.values()]
    assert all(map(math.isfinite, losses)), losses
    return f"test loss {', '.join(f'{loss:.3f}' for loss in losses)}"


def main(device: str = "cuda") -> None:
    failed = False
    for name in MODELS:
        began = time.perf_counter()
        try:
            said = train(name, device)
        except Exception:
            traceback.print_exc()
            said, failed = "failed", True
        print(f"{name}: {said}, {time.perf_counter() - began:.1f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
