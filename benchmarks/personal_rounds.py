"""How long does a round of personal models take beside a loop over clients, as PFLlib has one?

    python benchmarks/personal_rounds.py [--device cuda] [--rounds 3] [--repeats 3] [--full]

Twenty clients with classes by Dir(0.1) all take part in every round: one pass over three quarters
of their images in batches of 10, after which each client's model is tested on the rest. Both sides
do this work, in turns, in one process. The loop is written from PFLlib's description of itself, as
a researcher would: a module for each client, torch's DataLoader and SGD, one client after another.
On a CPU both may use all cores: Fedlens by a process for each, the loop by threads of torch; it
also runs with one thread, and the faster of both counts. A ratio above 1 means that Fedlens is
faster. `--full` takes Fashion-MNIST in place of its tenth.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedlens.config.experiment import Clients, Evaluate, Experiment, LocalTraining, Named
from fedlens.evaluation.evaluate import correct_answers
from fedlens.rounds import begin, run_round
from fedlens.runs.bench import time_of
from fedlens.runs.loop import torch_settings
from fedlens.runs.manifest import machine
from fedlens.setup import Setup, build
from fedlens.setup.network import untrained
from fedlens.storage.free_memory import num_cores

LR, BATCH, LAMBDA, HEAD = 0.005, 10, 0.1, "fc2."
METHODS: dict[str, dict[str, Any]] = {  # and their options
    "fedavg": {},
    "fedrep": {"head_epochs": 1},
    "ditto": {"lambda": LAMBDA},
}


def experiment(method: str, dataset: str, device: str) -> Experiment:
    return Experiment(
        dataset=dataset,
        model=Named("mcmahan-cnn", {"geometry": "valid"}),
        rounds=1,
        device=device,
        normalise={"mean": 0.5, "deviation": 0.5},
        clients=Clients(
            count=20,
            holdout=0.25,
            partition=Named("dirichlet-per-class", {"alpha": 0.1, "min_size": 40}),
        ),
        local=LocalTraining(batch_size=BATCH, lr=LR),
        evaluate=Evaluate(on=(), baselines=False),
        algorithm=Named(method, METHODS[method]),
    )


def by_fedlens(setup: Setup) -> Callable[[], None]:
    state = begin(setup.network, setup.program, setup.federation, setup.device)

    def one_round() -> None:
        nonlocal state
        state, _ = run_round(setup.program, setup.federation, setup.engine, state, 0)
        correct_answers(setup, setup.engine, state).sum().item()

    return one_round


def by_hand(method: str, setup: Setup) -> tuple[Callable[[], None], nn.Module, list[nn.Module]]:
    """A function that runs a round, the server's model, and the clients' own."""
    device = setup.device
    examples, held = setup.federation.examples, setup.federation.everyone(0)
    assert setup.client_tests is not None
    tests = setup.client_tests.holdings
    images = (examples.images.cpu().float() / 255 - 0.5) / 0.5
    labels = examples.labels.cpu()

    def loaded(index: Tensor, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(images[index], labels[index]), BATCH, shuffle)

    mine = [loaded(held.members(k), True) for k in range(len(held))]
    tested = [loaded(tests.members(k), False) for k in range(len(held))]
    sizes = held.sizes / held.sizes.sum()
    server = untrained(setup.experiment, setup.dataset.shape, 10).to(device)
    locals_ = [copy.deepcopy(server) for _ in mine]
    owns = [copy.deepcopy(server) for _ in mine] if method == "ditto" else locals_

    def batches(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in loader:
            yield x.to(device), y.to(device)

    def step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        if method == "ditto" and model in owns:
            for p, anchor in zip(model.parameters(), server.parameters(), strict=True):
                assert p.grad is not None
                p.grad.add_(p.detach() - anchor.detach(), alpha=LAMBDA)
        optimiser.step()

    def one_pass(model: nn.Module, k: int, part: Callable[[str], bool] = lambda _: True) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(part(name))
        moving = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.SGD(moving, lr=LR)
        for x, y in batches(mine[k]):
            step(model, optimiser, x, y)

    def is_head(name: str) -> bool:
        return method == "fedrep" and name.startswith(HEAD)

    def one_round() -> None:
        for k, model in enumerate(locals_):
            if method == "fedrep":
                one_pass(model, k, is_head)
            if method == "ditto":
                one_pass(owns[k], k)
            one_pass(model, k, lambda name: not is_head(name))
        with torch.no_grad():
            for name, mean in server.named_parameters():
                if is_head(name):
                    continue
                mean.zero_()
                for share, model in zip(sizes.tolist(), locals_, strict=True):
                    mean.add_(model.get_parameter(name), alpha=share)
                for model in locals_:
                    model.get_parameter(name).copy_(mean)
            right = 0
            for model, loader in zip(owns, tested, strict=True):
                right += sum(int((model(x).argmax(1) == y).sum()) for x, y in batches(loader))

    return one_round, server, owns


def measure(method: str, setup: Setup, arguments: argparse.Namespace) -> dict[str, Any]:
    loop, cores = by_hand(method, setup)[0], num_cores()
    sides = {"fedlens": (by_fedlens(setup), setup.threads), "loop, 1 thread": (loop, 1)}
    if setup.device.type == "cpu":
        sides[f"loop, {cores} threads"] = loop, cores
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(-1, arguments.repeats):  # the first is to warm up
        for side, (one_round, threads) in sides.items():
            with torch_settings(setup.experiment, setup.device, threads):
                taken = time_of(one_round, arguments.rounds, setup.device)
            if repeat >= 0:
                seconds[side].append(taken)
    loops = zip(*(taken for side, taken in seconds.items() if side != "fedlens"), strict=True)
    ratios = [min(b) / a for a, b in zip(seconds["fedlens"], loops, strict=True)]
    return {
        "method": method,
        "images": int(setup.federation.everyone(0).sizes.sum()),
        "engine": type(setup.engine).__name__.lower(),
        "seconds": {side: statistics.median(taken) for side, taken in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[*METHODS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    dataset = "fashion-mnist" if arguments.full else "fashion-mnist-mini"
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "rows": []}
    for method in arguments.methods:
        setup = build(experiment(method, dataset, arguments.device))
        found |= machine(setup)
        found["rows"].append(measure(method, setup, arguments))
        setup.engine.close()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
