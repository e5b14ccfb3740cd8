"""What does recording cost, and does it grow with the steps of a round?

    python benchmarks/recording.py [--device cuda] [--steps 470 940 1880] [--rounds 6] [--json]

Ten clients of simple-cnn take `--steps` steps per round on batches of 32, in one experiment and in
three side by side that differ in their seed. Every round is timed separately, including the first.
On a GPU the first rounds compile kernels that are not in Triton's cache, and record the graphs that
later rounds replay. "beyond" is the time of all rounds minus that of as many fastest rounds. If
only blocks of steps are recorded, it does not depend on the number of steps. A second call of this
script compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import replace

import torch

from fedlens.runs.bench import Workload, experiment, rounds_together, time_of
from fedlens.runs.loop import torch_settings
from fedlens.setup import Setup, build

CLIENTS, BATCH, EPOCHS = 10, 32, 10
SIDE_BY_SIDE = 3


def setups_of(steps: int, count: int, device: str, precision: str) -> list[Setup]:
    """Experiments that differ in their seed. Several epochs need fewer images per step."""
    work = Workload("simple-cnn", (3, 32, 32), CLIENTS, steps // EPOCHS, BATCH)
    one = experiment(work, "stacked", device, precision)
    one = replace(one, local=replace(one.local, epochs=EPOCHS))
    return [build(replace(one, seed=seed)) for seed in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--steps", type=int, nargs="+", help=f"[default: 940; on a CPU {EPOCHS}]")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device, rows = torch.device(arguments.device), []
    wanted = arguments.steps or [940 if device.type == "cuda" else EPOCHS]
    if any(steps < EPOCHS or steps % EPOCHS for steps in wanted) or arguments.rounds < 1:
        parser.error(f"--steps: choose multiples of {EPOCHS}; --rounds: 1 or more")
    for steps in wanted:
        for count in (1, SIDE_BY_SIDE):
            setups = setups_of(steps, count, arguments.device, arguments.precision)
            with torch_settings(setups[0].experiment, device):
                one_round = rounds_together(setups, setups[0].engine)
                seconds = [time_of(one_round, 1, device) for _ in range(arguments.rounds)]
            for setup in setups:
                setup.engine.close()
            beyond = sum(seconds) - len(seconds) * min(seconds)
            rows.append({"steps": steps, "experiments": count, "seconds": seconds})
            if not arguments.json:
                told = "  ".join(f"{one:.3f}" for one in seconds)
                print(f"{steps} steps, experiments: {count}  {told}  beyond {beyond:.3f} s")
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    precision = setups[0].experiment.precision
    about = {"machine": machine, "torch": torch.__version__, "precision": precision}
    print(json.dumps({**about, "rows": rows}) if arguments.json else about)


if __name__ == "__main__":
    main()
