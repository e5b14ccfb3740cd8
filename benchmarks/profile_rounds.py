"""Where does a round's time go on a GPU? The kernels of a round, by time.

python benchmarks/profile_rounds.py [--only pfl-cnn ...] [--precision bf16] [--top 25]
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from fedlens.runs.bench import WORKLOADS, experiment, rounds, time_of
from fedlens.runs.settings import torch_settings
from fedlens.setup import build

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS))
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--top", type=int, default=25)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    for name in arguments.only or WORKLOADS:
        setup = build(experiment(WORKLOADS[name], "stacked", "cuda", arguments.precision))
        with torch_settings(setup.experiment, device):
            one_round = rounds(setup)
            time_of(one_round, 5, device)
            wall = 1e3 * min(time_of(one_round, ROUNDS, device) for _ in range(3))
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                time_of(one_round, ROUNDS, device)
        kernels = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
        busy = sum(e.self_device_time_total for e in kernels) / 1e3 / ROUNDS
        count = sum(e.count for e in kernels) / ROUNDS
        print(f"{name}: {wall:.2f} ms a round, busy {busy:.2f} ms in {count:.0f} kernels")
        for event in kernels[: arguments.top]:
            each = event.self_device_time_total / 1e3 / ROUNDS
            print(f"  {each:8.3f} ms x{event.count / ROUNDS:6.1f}  {event.key[:110]}")
        setup.engine.close()


if __name__ == "__main__":
    main()
