"""Where does a round's time go on a GPU? The kernels of a round, by time.

    python benchmarks/profile_rounds.py [--only pfl-cnn ...] [--precision bf16] [--top 25] [--order]

With `--order` it also prints the kernels of one step in order, with their start and duration.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fedlens.runs.bench import WORKLOADS, experiment, rounds, time_of
from fedlens.runs.loop import torch_settings
from fedlens.setup import build

ROUNDS = 5
LOSS = "_cross_entropy_kernel"  # every step has one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS))
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--order", action="store_true")
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
        if arguments.order:
            print("  one step: start in µs, µs, kernel")
            for line in one_step(profiler):
                print(f"  {line}")
        setup.engine.close()


def one_step(profiler: Any) -> Iterator[str]:
    """The kernels of one step in the middle of the profile, from one loss to the next."""
    on_gpu = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    events = sorted(on_gpu, key=lambda event: event.time_range.start)
    losses = [i for i, event in enumerate(events) if event.name == LOSS]
    middle = len(losses) // 2
    some = events[losses[middle] : losses[middle + 1]]
    for event in some:
        start = event.time_range.start - some[0].time_range.start
        yield f"{start:8.1f} {event.time_range.elapsed_us():7.2f}  {event.name[:110]}"


if __name__ == "__main__":
    main()
