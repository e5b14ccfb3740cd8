"""What do the kernels of large networks gain on a GPU, and do they compute the same?

    python benchmarks/large_networks.py [--only resnet18 ...] [--what agree fused plain] [--top 15]

The networks are those of `fedlens bench` with normalisation layers, and that of paper 1, which has
batch normalisation. `agree` prints how far logits and gradients of one step in bf16 are from those
in float32, with our kernels and with PyTorch's operations alone. `fused` prints milliseconds per
round and the kernels sorted by time, with our kernels for normalisation and depthwise convolutions;
`plain` prints the same with PyTorch's operations instead of these kernels.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fedlens.models import MODELS
from fedlens.network import ops
from fedlens.network.network import Network
from fedlens.network.stacked import layers, products
from fedlens.network.stacked.epilogue import Epilogue
from fedlens.runs.bench import WORKLOADS, Workload, experiment, rounds, time_of
from fedlens.runs.loop import torch_settings
from fedlens.setup import build

NETWORKS = {name: WORKLOADS[name] for name in ("resnet18", "mobilenetv2")} | {
    "paper-1": Workload("resnet18", (3, 32, 32), 3, 20, 32)
}
WHAT = ["agree", "fused", "plain"]
ROUNDS = 5  # timed together
GPU = torch.device("cuda")


@contextlib.contextmanager
def plain(*, everything: bool = False) -> Iterator[None]:
    """Use PyTorch's operations instead of these kernels, or of all kernels (`everything`)."""

    def group_norm(*given: object) -> Tensor:
        *settings, epilogue = given
        assert isinstance(epilogue, Epilogue)
        return epilogue(products.group_norm(*settings))  # type: ignore[arg-type]

    def convolve_channels(x: Tensor, *given: object) -> Tensor:
        return products.grouped_convolve(x, *given, (1, 1), x.shape[1])  # type: ignore[arg-type, call-arg]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(layers, "group_norm", group_norm))
        stack.enter_context(mock.patch.object(layers, "batch_norm", lambda *_: None))
        stack.enter_context(mock.patch.object(layers, "convolve_channels", convolve_channels))
        if everything:
            stack.enter_context(mock.patch.object(ops, "_takes_triton", lambda _: False))
        yield


def one_step(work: Workload, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and all gradients of one step of `work` on random images."""
    torch.manual_seed(0)
    module = MODELS[work.model](work.shape, 10, **work.options)
    network = Network(module, dtype=torch.float32, compute=compute)
    clients = work.clients
    every = {name: p[None].to(GPU) for name, p in network.params.items()}
    params = {
        name: (p.expand(clients, *p.shape[1:]) + 0.01 * torch.randn_like(p)).requires_grad_()
        for name, p in network.lay_out_stacked(every).items()
    }
    images = torch.randn(clients, work.batch, *work.shape, device=GPU)
    labels = torch.randint(10, (clients * work.batch,), device=GPU)
    keys = torch.arange(clients, device=GPU)
    mask = torch.ones(clients, work.batch, device=GPU)
    buffers = {
        name: b.to(GPU).expand(clients, *b.shape).clone() for name, b in network.buffers.items()
    }
    logits, _ = network.stacked(params, buffers, images, keys, mask)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels)
    grads = torch.autograd.grad(loss, list(params.values()))
    return logits.detach().float(), torch.cat([g.flatten() for g in grads])


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def agreement(work: Workload) -> str:
    with plain(everything=True):
        exact = one_step(work, torch.float32)
        before = one_step(work, torch.bfloat16)
    after = one_step(work, torch.bfloat16)
    shown = [
        f"{what} {off(a, e):.4f} (plain {off(b, e):.4f})"
        for what, a, b, e in zip(("logits", "gradients"), after, before, exact, strict=True)
    ]
    return "bf16 off from float32: " + ", ".join(shown)


def measure(name: str, top: int) -> None:
    setup = build(experiment(NETWORKS[name], "stacked", "cuda", "bf16"))
    with torch_settings(setup.experiment, GPU):
        one_round = rounds(setup)
        time_of(one_round, 5, GPU)
        wall = 1e3 * min(time_of(one_round, ROUNDS, GPU) for _ in range(3))
        print(f"{name}: {wall:.2f} ms a round", flush=True)
        if top:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                time_of(one_round, 2, GPU)
            kernels = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
            busy = sum(e.self_device_time_total for e in kernels) / 2e3
            launched = sum(e.count for e in kernels) / 2
            print(f"  busy {busy:.2f} ms in {launched:.0f} kernels")
            for event in kernels[:top]:
                each = event.self_device_time_total / 2e3
                print(f"  {each:8.3f} ms x{event.count / 2:6.1f}  {event.key[:90]}", flush=True)
    setup.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=NETWORKS)
    parser.add_argument("--top", type=int, default=15)
    parser.add_argument("--what", nargs="*", choices=WHAT, default=WHAT)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in arguments.only or NETWORKS:
        if "agree" in arguments.what:
            print(f"{name}: {agreement(NETWORKS[name])}", flush=True)
        if "fused" in arguments.what:
            measure(name, arguments.top)
        if "plain" in arguments.what:
            print("by PyTorch's operations, ", end="")
            with plain():
                measure(name, arguments.top)


if __name__ == "__main__":
    main()
