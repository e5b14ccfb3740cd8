"""On a GPU: every built-in network, trained and evaluated by engine `stacked`, two seeds at once.

What the first one came to is evaluated again, in fp32 and in bf16, which must not differ.

    PYTHONPATH=src:. python tests/gpu/models.py [DEVICE]

Plain Python with torch and numpy, on images of noise. DEVICE is `cuda` unless another is named
(`cpu`). It prints a line for each network, and ends with status 1 if one failed.
"""

import math
import sys
import time
import traceback
from dataclasses import replace

from fedlens.config.experiment import Experiment
from fedlens.core import Tree
from fedlens.evaluation.evaluate import evaluate
from fedlens.evaluation.metrics import metrics
from fedlens.models import MODELS
from fedlens.rounds import begin
from fedlens.runs.bench import Workload, experiment
from fedlens.runs.sweep import prepare
from fedlens.setup import build
from tests.gpu.parts import my_part

SHAPE = (3, 64, 64)  # the smallest images that every network takes
APART = 0.01  # of the loss: bf16 rounds to one part in 256, and errors of many layers nearly cancel


def train(name: str, device: str) -> str:
    """Two rounds of three clients, with an evaluation after each."""
    one = experiment(Workload(name, SHAPE, 3, 2, 8), "stacked", device, "auto")
    points = {f"seed {seed}": replace(one, rounds=2, seed=seed) for seed in range(2)}
    results = prepare(points).run()
    losses = [result.final["test_loss"] for result in results.values()]
    assert all(map(math.isfinite, losses)), losses
    model = next(iter(results.values())).model
    in_fp32, in_bf16 = (
        tested(replace(one, precision=precision), model) for precision in ("fp32", "bf16")
    )
    assert abs(in_bf16["loss"] / in_fp32["loss"] - 1) < APART, (in_fp32, in_bf16)
    both = "; ".join(
        f"{measure} in fp32 and bf16 {in_fp32[measure]:.4f}, {in_bf16[measure]:.4f}"
        for measure in ("loss", "accuracy")
    )
    return f"test loss {', '.join(f'{loss:.3f}' for loss in losses)}; of the first {both}"


def tested(described: Experiment, model: Tree) -> dict[str, float]:
    """What a model comes to on the test images, in the precision of an experiment."""
    setup = build(described)
    start = begin(setup.network, setup.program, setup.federation, setup.device)
    params, buffers = (
        {name: model[name].to(setup.device) for name in tree}
        for tree in (start.params, start.buffers)
    )
    state = replace(start, params=params, buffers=buffers)
    loss, classes = setup.program.algorithm.objective.loss, setup.dataset.num_classes
    tally = evaluate(setup.engine, state, setup.parts["test"], classes, loss)
    found = metrics(tally)
    setup.engine.close()
    return found


def main(device: str = "cuda") -> None:
    failed = False
    for name in my_part([*MODELS]):
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
