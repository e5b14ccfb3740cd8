"""What does it cost on a GPU that clients of a large network remember something between rounds?

    python benchmarks/client_memory.py [--only scaffold ...] [--rounds 10] [--top 12] [--on-host]

Ten of a hundred clients train ResNet-18 with group normalisation for 50 steps on batches of 50
images of 32 x 32. It prints seconds a round of FedAvg, SCAFFOLD, FedDyn and FedADMM, as multiples
of FedAvg's, too. With `--top` the kernels that take most of a round follow. `--on-host` leaves no
room on the GPU for what clients remember, so that all of it is copied there and back.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from fedlens.config.experiment import Clients, Named
from fedlens.runs.bench import Workload, experiment, rounds, time_of
from fedlens.runs.loop import torch_settings
from fedlens.setup import build

WORK = Workload("resnet18", (3, 32, 32), 10, 50, 50, {"stem": "cifar", "norm": "group"})
ALGORITHMS = ("fedavg", "scaffold", "feddyn", "fedadmm")
COUNT = 100  # clients in all
GPU = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=ALGORITHMS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--on-host", action="store_true")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    plain = experiment(WORK, "stacked", "cuda", "bf16")
    each = len(plain.dataset.train) // COUNT  # type: ignore[union-attr]
    clients = Clients(count=COUNT, per_round=WORK.clients, partition=Named("iid"))
    local = replace(plain.local, epochs=WORK.steps * WORK.batch // each)
    fedavg = None
    if arguments.on_host:
        mock.patch("fedlens.rounds.client_memory.REMEMBERED", 0.0).start()
    for name in ("fedavg", *(arguments.only or ALGORITHMS[1:])):
        setup = build(replace(plain, clients=clients, local=local, algorithm=(Named(name),)))
        with torch_settings(setup.experiment, GPU):
            one_round = rounds(setup)
            time_of(one_round, 5, GPU)
            torch.cuda.reset_peak_memory_stats()
            taken = min(time_of(one_round, arguments.rounds, GPU) for _ in range(3))
            peak = torch.cuda.max_memory_allocated() / 2**30
            fedavg = fedavg or taken
            line = f"{name:<10}{taken:.4f} s a round, {taken / fedavg:.2f} of FedAvg's"
            print(f"{line}, {peak:.1f} GiB at most", flush=True)
            if arguments.top:
                with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                    time_of(one_round, 2, GPU)
                kernels = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
                for event in kernels[: arguments.top]:
                    spent = event.self_device_time_total / 2e3
                    print(f"  {spent:8.3f} ms x{event.count / 2:7.1f}  {event.key[:90]}")
        setup.engine.close()
        del setup, one_round
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
