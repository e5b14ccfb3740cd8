"""What does privacy cost in time and memory?

    python benchmarks/private_steps.py PART [--device cuda] [--precision tf32] [--json]

Parts, each with all its sides measured in turns in one process (the median of `--repeats`):

steps     a step of DP-SGD against the plain step of the same batch, and against the gradients of
          every example by torch.func (vmap of grad), for hsu-cnn and ResNet-18 with group norm
opacus    the same step against those of opacus 1.6 (which must be installed), on the CPU: with the
          gradient of every example, and by ghost clipping
clients   a round with privacy of clients against the same round without
shadows   64 shadow runs of the audit, side by side, against as many by a loop over hand-written
          training, of which two are run and the others counted

A ratio is the first side's time by the second's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedlens.audit import membership
from fedlens.config.experiment import Clients, Experiment, Privacy
from fedlens.runs.bench import Workload, experiment, rounds, time_of
from fedlens.runs.loop import torch_settings
from fedlens.setup import Setup, build
from origin import origin

CLIP, NOISE, LR = 1.0, 1.0, 0.1
Work = Callable[[], object]


@dataclass(frozen=True)
class Side:
    """What is timed: `work`, which does `steps` of it."""

    name: str
    work: Work
    steps: int = 1


def measured(
    sides: list[Side], device: torch.device, repeats: int, times: int = 1
) -> dict[str, Any]:
    """Seconds a step of each side, the others' times by the first's, and memory on a GPU.

    Each side does its work `times` after another: a GPU has the next round before it ends one.
    """
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    memory: dict[str, float] = {}
    for repeat in range(-3, repeats):  # a GPU records a round that has occurred three times
        for side in sides:
            measures = device.type == "cuda" and repeat == -3  # later a recording holds its memory
            if measures:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            took = time_of(side.work, 1 if repeat < 0 else times, device) / side.steps
            if measures:
                memory[side.name] = torch.cuda.max_memory_allocated(device) / 2**20
            if repeat >= 0:
                seconds[side.name].append(took)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    first = sides[0].name
    ratios = {
        f"{first} / {other}": statistics.median(
            a / b for a, b in zip(seconds[first], seconds[other], strict=True)
        )
        for other in seconds
        if other != first
    }
    return {"seconds": found, "ratios": ratios, **({"peak MiB": memory} if memory else {})}


def one_client(model: str, batch: int, steps: int, arguments: argparse.Namespace) -> Experiment:
    """A client with `steps` batches, on an engine that keeps everything in this process."""
    engine = "stacked" if arguments.device.startswith("cuda") else "sequential"
    work = Workload(model, (3, 32, 32), 1, steps, batch)
    made = experiment(work, engine, arguments.device, arguments.precision)
    private = Privacy(unit="example", noise=NOISE, clip=CLIP)
    return replace(made, norm="group", privacy=private)


def by_func(module: nn.Module, images: Tensor, labels: Tensor) -> Work:
    """A step with every example's gradient in memory."""
    params = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss(held: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits: Tensor = functional_call(module, held, (image[None],))
        return F.cross_entropy(logits, label[None])

    each = vmap(grad(loss), (None, 0, 0), randomness="different")

    def step() -> None:
        grads = each(params, images, labels)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (CLIP / norms).clamp(max=1)
        for name, g in grads.items():
            total = torch.tensordot(factors, g, 1)
            total += NOISE * CLIP * torch.randn_like(total)
            params[name].sub_(total, alpha=LR / len(images))

    return step


def by_opacus(module: nn.Module, images: Tensor, labels: Tensor, ghost: bool = False) -> Work:
    """The same by Opacus' module and optimiser, on one batch; `ghost`: by its ghost clipping."""
    fast = "FastGradientClipping" if ghost else ""
    parts: Any = importlib.import_module("opacus.grad_sample")
    norm = {"max_grad_norm": CLIP} if ghost else {}
    wrapped = getattr(parts, f"GradSampleModule{fast}")(module, **norm)
    optimiser = getattr(importlib.import_module("opacus.optimizers"), f"DPOptimizer{fast}")(
        torch.optim.SGD(wrapped.parameters(), lr=LR),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=len(images),
    )
    criterion: Any = nn.CrossEntropyLoss()
    if ghost:
        losses: Any = importlib.import_module("opacus.utils.fast_gradient_clipping_utils")
        criterion = losses.DPLossFastGradientClipping(wrapped, optimiser, criterion)

    def step() -> None:
        optimiser.zero_grad()
        criterion(wrapped(images), labels).backward()
        optimiser.step()

    return step


def a_batch(setup: Setup, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The module, and a batch of images and labels, where they are trained."""
    network, examples = setup.network, setup.federation.examples
    which = torch.arange(batch, device=examples.images.device)
    images = (examples.read(which).float() / 255 - 0.5) / 0.5
    module = network.module.to(setup.device).train()
    return module, images.to(setup.device), examples.labels[which].to(setup.device)


OTHERS: dict[str, dict[str, Callable[..., Work]]] = {
    "steps": {"torch.func": by_func},
    "opacus": {"opacus": by_opacus, "opacus, ghost": partial(by_opacus, ghost=True)},
}


def steps_part(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    gpu, rows = arguments.device.startswith("cuda"), []
    for model in ("hsu-cnn", "resnet18"):
        batch = arguments.batch or (256 if gpu else 32)
        steps = arguments.steps or (20 if gpu else 2)
        private = one_client(model, batch, steps, arguments)
        setups = [build(private), build(replace(private, privacy=None))]
        device = setups[0].device
        with torch_settings(private, device):
            sides = [
                Side("DP-SGD", rounds(setups[0]), steps),
                Side("plain", rounds(setups[1]), steps),
                *(
                    Side(name, work(*a_batch(build(private), batch)))
                    for name, work in OTHERS[arguments.part].items()
                ),
            ]
            rows.append(
                {"model": model, "batch": batch} | measured(sides, device, arguments.repeats)
            )
        for setup in setups:
            setup.engine.close()
    return rows


def clients_part(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    gpu, rows = arguments.device.startswith("cuda"), []
    for model, clients, steps, batch in (("hsu-cnn", 10, 8, 64), ("lenet5", 50, 5, 20)):
        shape = (3, 32, 32) if model == "hsu-cnn" else (1, 28, 28)
        work = Workload(model, shape, clients, steps if gpu else max(steps // 2, 1), batch)
        engine = "stacked" if gpu else "sequential"
        plain = experiment(work, engine, arguments.device, arguments.precision)
        plain = replace(plain, rounds=10_000)
        delta = Privacy(noise=NOISE, delta=1e-6, sampling="fixed")
        setups = [build(replace(plain, privacy=delta)), build(plain)]
        with torch_settings(plain, setups[0].device):
            sides = [Side("private", rounds(setups[0])), Side("plain", rounds(setups[1]))]
            times = 20 if gpu else 1
            found = measured(sides, setups[0].device, max(arguments.repeats, 7), times)
        rows.append({"model": model, "clients": clients} | found)
    return rows


def by_hand(setup: Setup, epochs: int, batch: int) -> Work:
    """Plain training on half of the images: a shadow run as a loop has it."""
    module, images, labels = a_batch(setup, len(setup.federation.examples))
    optimiser = torch.optim.SGD(module.parameters(), lr=LR)

    def run() -> None:
        for _ in range(epochs):
            chosen = torch.randperm(len(images), device=images.device)[: len(images) // 2]
            for some in torch.split(chosen, batch):
                optimiser.zero_grad()
                F.cross_entropy(module(images[some]), labels[some]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()

    return run


def shadows_part(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    gpu = arguments.device.startswith("cuda")
    shadows, epochs, batch = (64, 10, 32) if gpu else (4, 2, 32)
    count, looped = (2000 if gpu else 400), 2
    work = Workload("hsu-cnn", (3, 32, 32), 1, count // batch, batch)
    engine = "stacked" if gpu else "sequential"
    made = experiment(work, engine, arguments.device, arguments.precision)
    made = replace(made, rounds=epochs, clients=Clients(count=1))
    setup = build(made)
    sides = [
        Side("side by side", lambda: membership.audit(setup, shadows), shadows),
        Side("by a loop", by_hand(build(made), epochs, batch)),
    ]
    with torch_settings(made, setup.device):
        membership.audit(build(replace(made, rounds=1)), shadows)  # compiles kernels, not timed
        by_hand(build(made), 1, batch)()  # loads cuDNN
        seconds = {}
        for side in sides:
            times = 1 if side.steps > 1 else looped
            seconds[side.name] = shadows * time_of(side.work, times, setup.device) / side.steps
    ratio = seconds["by a loop"] / seconds["side by side"]
    told = {
        "model": "hsu-cnn",
        "shadows": shadows,
        "epochs": epochs,
        "images": len(setup.federation.examples),
    }
    return [told | {"seconds": seconds, "times as fast": ratio}]


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "steps": steps_part,
    "opacus": steps_part,
    "clients": clients_part,
    "shadows": shadows_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="of a round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.part == "opacus":
        arguments.device = "cpu"
    rows = PARTS[arguments.part](arguments)
    on_gpu = arguments.device.startswith("cuda")
    machine = torch.cuda.get_device_name() if on_gpu else platform.machine()
    about = origin() | {"part": arguments.part, "machine": machine, "torch": torch.__version__}
    about |= {"threads": torch.get_num_threads(), "precision": arguments.precision}
    about |= {"load": [*os.getloadavg()], "repeats": arguments.repeats}
    if arguments.part == "opacus":
        about["opacus"] = importlib.import_module("opacus").__version__
    if arguments.json:
        print(json.dumps({**about, "rows": rows}))
        return
    print(about)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
