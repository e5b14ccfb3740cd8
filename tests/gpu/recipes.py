"""On a GPU: the runs of every recipe at `smoke`, timed and run as sweeps on engine `stacked`.

    PYTHONPATH=src:. python tests/gpu/recipes.py [DEVICE]

Plain Python with torch and numpy, since a bare GPU machine has no more: no folder is written and
no page is drawn. DEVICE is `cuda` unless another is named (`cpu`). It prints a line for each
recipe, ends with "all run", and with status 1 if a recipe failed.
"""

import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fedlens.config.experiment import Experiment
from fedlens.recipes import RECIPES
from fedlens.recipes.estimate import Timing
from fedlens.recipes.recipe import FROM_CELL, Scale
from fedlens.runs.result import Result
from fedlens.runs.sweep import prepare
from tests.gpu.parts import my_part


def train(name: str, device: str, models: Path) -> str:
    """Train what a recipe trains, and say what that was."""
    recipe = RECIPES[name](Scale("smoke"))
    points: dict[str, Experiment] = {
        f"{cell}, seed {seed}": replace(cell_, seed=seed, device=device, engine="stacked")
        for cell, cell_ in recipe.cells.items()
        for seed in recipe.seeds
    }
    if not points:
        return "nothing to train"
    expected = sum(one.seconds for one in Timing(points.values()).sweeps([points]))
    first = {name: one for name, one in points.items() if not starts_from_cell(one)}
    stacks, results = sweep(first)
    depends: dict[str, Experiment] = {}
    for name, one in points.items():
        if one.weights is not None and starts_from_cell(one):
            start = f"{one.weights.removeprefix(FROM_CELL)}, seed {one.seed}"
            file = models / f"{len(depends)}.pt"
            torch.save(results[start].model, file)
            depends[name] = replace(one, weights=str(file))
    if depends:
        more, after = sweep(depends)
        stacks, results = stacks + more, results | after
    bad = [name for name, result in results.items() if result.status != "finished"]
    diverged = f", diverged: {'; '.join(bad)}" if bad else ""
    return f"{len(points)} runs in {stacks} stacks, expected {expected:.1f} s{diverged}"


def starts_from_cell(experiment: Experiment) -> bool:
    return (experiment.weights or "").startswith(FROM_CELL)


def sweep(points: Mapping[str, Experiment]) -> tuple[int, dict[str, Result]]:
    made = prepare(points)
    return len(made.stacks), made.run()


def main(device: str = "cuda") -> None:
    bad = 0
    mine = my_part([*RECIPES])
    for name in mine:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as models:
            try:
                said = train(name, device, Path(models))
            except Exception:
                traceback.print_exc()
                said, bad = "failed", bad + 1
        print(f"{name}: {said}, {time.perf_counter() - began:.1f} s", flush=True)
    print("all run" if not bad else f"{bad} of {len(mine)} failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
