"""Triton kernels beside plain PyTorch, on the CPU by interpretation: run with TRITON_INTERPRET=1.

On a GPU the same runs as it is, compiled: `python tests/network/interpreted_kernels.py`.
"""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, vmap

from fedlens.core import Number, Tree, keys, per_row
from fedlens.network import ops
from fedlens.network.functional import LayeredModel
from fedlens.network.kernels import elementwise, functions, norms, private
from fedlens.network.layers import MaskedBatchNorm, Running, keyed_dropout
from fedlens.network.network import Network
from fedlens.network.ops import normalise
from fedlens.network.private import KEPT, OfImages, private_model
from fedlens.network.stacked import products
from fedlens.network.stacked.epilogue import Epilogue, KeyedMask
from fedlens.network.stacked.products import Factors, drifted
from tests.gpu.parts import my_part
from tests.network.agreeing import DEVICE, LOOSE, agree, compare, last, on_one_side
from tests.network.interpreted_convolutions import (
    CONVOLUTIONS,
    convolutions,
    depthwise_convolutions,
)
from tests.network.interpreted_defences import (
    distances,
    order_statistics,
    row_products,
)
from tests.network.interpreting import spare_repetition

NORMS = {  # channels, groups, size of images, affine, add, relu, limit
    "norm": (12, 3, (5, 4), True, False, False, 0.0),
    "norm, relu": (64, 16, (3, 3), True, False, True, 0.0),
    "norm, relu6, width 5, one pixel": (160, 32, (1, 1), True, False, True, 6.0),
    "norm, addition": (20, 2, (4, 4), True, True, False, 0.0),
    "norm, addition, relu, several tiles": (40, 10, (33, 33), True, True, True, 0.0),
    "norm, width 6, one tile forwards": (24, 4, (17, 17), True, False, False, 0.0),
    "norm, no weights, one wide group": (144, 1, (3, 2), False, True, True, 6.0),
}


def group_norms(names: Iterable[str] = NORMS) -> None:
    clients, batch = 2, 3
    for name in names:
        channels, groups, image, affine, add, relu, limit = NORMS[name]
        x = last(3 * torch.randn(clients * batch, channels, *image, device=DEVICE) + 5)
        around = last(torch.randn_like(x)).requires_grad_() if add else None
        weight = torch.randn(clients, channels, device=DEVICE).requires_grad_() if affine else None
        bias = torch.randn(clients, channels, device=DEVICE).requires_grad_() if affine else None
        x.requires_grad_()
        epilogue = Epilogue(around, relu, limit)
        given = weight, bias, clients, groups, 1e-5
        found = norms.group_norm(x, *given, epilogue)
        expected = epilogue(products.group_norm(x, *given))
        leaves = {"x": x, "weight": weight, "bias": bias, "around": around}
        compare(name, found, expected, leaves, 1e-5)
        print(f"{name} agrees")


AFFINE = ("weight", "bias")
BATCHES = {  # channels, size of images, affine, tracked, add, relu, limit
    "batch norm": (12, (5, 4), True, True, False, False, 0.0),
    "batch norm, relu6, one pixel": (40, (1, 1), True, True, False, True, 6.0),
    "batch norm, addition, relu, several tiles": (20, (16, 15), True, True, True, True, 0.0),
    "batch norm, no weights, not tracked, addition": (8, (3, 2), False, False, True, False, 0.0),
}


def batch_norms(names: Iterable[str] = BATCHES) -> None:
    """Of three clients: one whose batch is whole, one with padding, one with nothing else."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]], device=DEVICE)
    clients, batch = mask.shape
    for name in names:
        channels, image, affine, tracked, add, relu, limit = BATCHES[name]
        plain = nn.BatchNorm2d(channels, affine=affine, track_running_stats=tracked).to(DEVICE)
        layer = MaskedBatchNorm(plain)
        stacked = {
            name: t.expand(clients, *t.shape).clone()
            for name, t in (*layer.named_parameters(), *layer.named_buffers())
            if name != "mask"
        }
        leaves = {name: t + torch.randn_like(t) for name, t in stacked.items() if name in AFFINE}
        x = last(3 * torch.randn(clients * batch, channels, *image, device=DEVICE) + 5)
        leaves |= {"x": x} | ({"around": last(torch.randn_like(x))} if add else {})
        leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
        epilogue = Epilogue(leaves.get("around"), relu, limit)
        ours = {name: t.clone() for name, t in stacked.items()} | leaves
        theirs = {name: t.clone() for name, t in stacked.items()} | leaves
        buffers = dict(layer.named_buffers()) if tracked else {}
        running = None
        if tracked:
            seen = ours["num_batches_tracked"]
            running = Running(ours["running_mean"], ours["running_var"], seen, 0.1)
        given = ours.get("weight"), ours.get("bias"), mask, layer.eps, running, epilogue
        found = norms.batch_norm(leaves["x"], *given)

        def one(tensors: Tree, rows: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
            y: torch.Tensor = functional_call(layer, tensors, (rows,))
            return y

        own = {name: theirs[name] for name in stacked} | {"mask": mask}
        rows = leaves["x"].view(clients, batch, channels, *image)
        expected = epilogue(vmap(one)(own, rows).flatten(0, 1))
        real = mask.flatten()[:, None, None, None] != 0  # padding has no part in any loss
        agree(f"{name}: padding", found, expected, 1e-5)
        # Few numbers that are nearly alike: what is left of their differences is less exact.
        compare(name, found * real, expected * real, dict(leaves), 1e-4)
        for buffer in buffers.keys() - {"mask"}:
            agree(f"{name}: {buffer}", ours[buffer].float(), theirs[buffer].float(), 1e-5)
        print(f"{name} agrees")


class Residual(nn.Module):
    """A user's own module of known layers, with every way that these are computed together."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU6())
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False)
        self.norm = nn.GroupNorm(4, 8)
        self.around = nn.Sequential(nn.Conv2d(8, 8, 1, stride=2), nn.GroupNorm(1, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out = self.norm(self.depthwise(x))
        out += self.around(x)
        logits: torch.Tensor = self.head(F.relu(out).mean((2, 3)))
        return logits


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 5, padding=2), nn.Conv2d(8, 16, 3)
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        logits: torch.Tensor = self.head(F.relu(self.second(x)).flatten(1))
        return logits


def networks() -> None:
    """A module read as it is: with kernels and without."""
    network, clients = Network(Residual()), 3
    assert isinstance(network.stacked, LayeredModel)
    start = {name: p.expand(clients, *p.shape).to(DEVICE) for name, p in network.params.items()}
    params = {name: (p + 0.1 * torch.randn_like(p)).requires_grad_() for name, p in start.items()}
    x = torch.randn(clients, 2, 3, 7, 6, device=DEVICE)
    side = torch.arange(clients, device=DEVICE), torch.ones(clients, 2, device=DEVICE)

    def logits(takes_triton: bool) -> torch.Tensor:
        with mock.patch.object(ops, "_takes_triton", lambda _: takes_triton):
            return network.stacked(params, {}, x, *side)[0]

    compare("a network", logits(True), logits(False), dict(params), LOOSE)
    print("a network agrees")


def the_rest() -> None:
    client_keys = keys.fold(keys.root(3), torch.arange(2)).to(DEVICE)
    images = torch.randn(2, 3, 5, 4, 6, device=DEVICE)
    last = images.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    for channels in (False, True):
        expected = torch.stack(
            [
                keyed_dropout(x, k, 0.3, 1, call=2, channels=channels)
                for x, k in zip(images, client_keys, strict=True)
            ]
        )
        mask = KeyedMask(client_keys, 0.3, 1, call=2)
        found = functions.dropout(last, mask, whole_channels=channels)
        torch.testing.assert_close(found.view_as(images), expected)
    for width in (60, 61):
        rows = torch.randn(2, 3, width, device=DEVICE)
        expected = torch.stack(
            [keyed_dropout(x, k, 0.3, 1, call=2) for x, k in zip(rows, client_keys, strict=True)]
        )
        found = functions.dropout(rows, mask, whole_channels=False)
        torch.testing.assert_close(found, expected)

    logits = torch.randn(2, 7, 10, device=DEVICE, requires_grad=True)
    labels, weight = torch.randint(10, (2, 7), device=DEVICE), torch.rand(2, 7, device=DEVICE)
    weight[:, 5:] = 0
    found = products.apply(functions.MeanCrossEntropy, logits, labels, weight)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = (weight * losses.view(labels.shape)).sum(1) / weight.sum(1)
    torch.testing.assert_close(found, expected)
    pull = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, logits, pull),
        torch.autograd.grad(expected, logits, pull),
        strict=True,
    ):
        torch.testing.assert_close(one, other)

    pixels = torch.randint(256, (4, 3, 5, 6), dtype=torch.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    expected = normalise(pixels, mean, std, torch.float32).to(DEVICE)
    scale = 1 / (255 * torch.tensor(std, device=DEVICE))
    shift = -torch.tensor(mean, device=DEVICE) / torch.tensor(std, device=DEVICE)
    for layout in (torch.contiguous_format, torch.channels_last):
        moved = pixels.to(DEVICE).contiguous(memory_format=layout)
        found = elementwise.normalise(moved, scale, shift, torch.float32)
        torch.testing.assert_close(found, expected)
    print("dropout, cross-entropy and normalising agree")


def factors(batch: int, features: int, out: int, steps: int) -> None:
    groups, clients = 2, 4
    start = torch.randn(groups, out, features, device=DEVICE)
    bias = torch.randn(clients, out, device=DEVICE, requires_grad=True)
    lr, decay = (
        torch.tensor(rates, device=DEVICE, dtype=torch.float32)
        for rates in ([0.1, 0.2], [0.9, 1.0])
    )
    rooms = [
        (
            torch.zeros(clients, steps * batch, features, device=DEVICE),
            torch.zeros(clients, steps * batch, out, device=DEVICE),
        )
        for _ in range(2)
    ]
    drifts = torch.randn(clients, out, features, device=DEVICE)
    many = torch.arange(steps + 1)
    times = drifted(many, torch.tensor([0.1, 0.2]), torch.tensor([0.9, 1.0]))
    times = times.to(DEVICE, torch.float32)
    for step, number in enumerate(torch.arange(steps, device=DEVICE).unbind()):
        size = batch - step  # a batch may be a short one
        x = torch.randn(clients, size, features, device=DEVICE, requires_grad=True)
        pull = torch.randn(clients, size, out, device=DEVICE)
        ys = []
        for form, room in zip((functions, products), rooms, strict=True):
            drift = drifts if step else None
            whole = Factors(start, *room, number, batch, lr, decay.log2(), drift, times)
            ys.append(products.apply(form.FactoredLinear, x, bias, whole, step != 1))
        pull = on_one_side(pull, *ys)
        results = [
            (y, *torch.autograd.grad(y, (x, bias), pull), inputs, grads)
            for y, (inputs, grads) in zip(ys, rooms, strict=True)
        ]
        for what, one, other in zip(("y", "dx", "db", "X", "D"), *results, strict=True):
            agree(f"factors, {what} of step {step}", one, other)
    print("factors agree")


def small_layer(batch: int, features: int, out: int, *, relu: bool) -> None:
    x = torch.randn(3, batch, features, device=DEVICE, requires_grad=True)
    weight = torch.randn(3, out, features, device=DEVICE, requires_grad=True)
    bias = torch.randn(3, out, device=DEVICE, requires_grad=True)
    found = products.apply(functions.Linear, x, weight, bias, relu)
    expected = products.apply(products.Linear, x, weight, bias, relu)
    agree("small layer", found, expected)
    pull = on_one_side(torch.randn_like(expected), found, expected)
    both = (torch.autograd.grad(y, (x, weight, bias), pull) for y in (found, expected))
    for what, one, other in zip(("dx", "dw", "db"), *both, strict=True):
        agree(f"small layer, {what}", one, other)
    print("small layer agrees")


def steps() -> None:
    """Tensors [C, ...] in two memory layouts, under numbers for all clients and for each."""
    like = [torch.randn(3, 5, 7, device=DEVICE).transpose(1, 2), torch.randn(3, 900, device=DEVICE)]

    def some(clients: int = 3) -> list[torch.Tensor]:
        return [torch.randn_like(t[:clients]) for t in like]

    numbers: tuple[Number, ...] = (
        0.3,
        torch.rand(3, device=DEVICE),
        torch.tensor(0.6, device=DEVICE),
    )
    for lr, momentum, decay in zip(
        numbers, numbers[1:] + numbers[:1], reversed(numbers), strict=True
    ):
        for has_velocity, decaying, nesterov in (
            (False, [False, False], False),
            (False, [True, False], False),
            (True, [False, True], False),
            (True, [True, True], True),
        ):
            params, grads, velocity = some(), some(), some() if has_velocity else []
            w, g, v = ([t.clone() for t in tensors] for tensors in (params, grads, velocity))
            with mock.patch.object(ops, "_takes_triton", lambda _: False):
                ops.sgd_(w, g, v, lr, momentum, decay, decaying, nesterov=nesterov)
            elementwise.sgd_(
                params, grads, velocity, lr, momentum, decay, decaying, nesterov=nesterov
            )
            torch.testing.assert_close([params, velocity], [w, v])
    for lr, decay in itertools.product(numbers, numbers):
        for server, drift in ((some(1), []), (some(1), some()), (some(), some())):
            params, grads, nothing = some(), some(), [torch.zeros_like(t) for t in like]
            expected = [
                s + per_row(decay, w) * (w - s) - per_row(lr, w) * (g + d)
                for w, g, s, d in zip(params, grads, server, drift or nothing, strict=True)
            ]
            elementwise.local_step_(params, grads, server, drift, lr, decay)
            torch.testing.assert_close(params, expected)
    print("steps agree")


def noise() -> None:
    client_keys, counts = keys.fold(keys.root(3), torch.arange(3)), torch.tensor([7, 1, 20])
    std = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    for size, dtype in itertools.product((1, 2, 5000, 5001), (torch.float32, torch.float64)):
        given = torch.randn(3, size, dtype=dtype), client_keys, 4, std, counts
        expected = ops.noisy_mean(*given)
        on_device = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in given]
        found = private.noisy_mean(*on_device)  # type: ignore[arg-type]
        near = 1e-5 if dtype is torch.float32 else 1e-12
        torch.testing.assert_close(found.cpu(), expected, rtol=near, atol=near)
    print("noise of DP-SGD agrees")


def clipping() -> None:
    """What an example adds to the sum has the norm by which it was clipped."""
    kinds = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
    for (channels, outs, side), dtype in itertools.product(
        ((8, 6, 3), (3, 4, 9), (6, 7, 1)), kinds
    ):
        layer = nn.Conv2d(channels, outs, 3, padding=1, device=DEVICE)
        x, dy = (
            torch.randn(1, 5, n, side, side, device=DEVICE).to(dtype) for n in (channels, outs)
        )
        for kept in ({"cpu": 0, "cuda": 0}, KEPT):
            with mock.patch.dict(KEPT, kept):
                of_layer = OfImages(layer, frozenset({"weight", "bias"}), x, dy)
                squared = of_layer.squared()
                for example, factor in itertools.product(range(5), (1.0, 0.3)):
                    only = torch.zeros(1, 5, device=DEVICE)
                    only[0, example] = factor
                    added = of_layer.weighted(only)
                    norm = sum(t.double().square().sum() for t in added.values())
                    expected = factor**2 * squared[0, example].double()
                    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    network, clients = Network(Pooled()), 2
    params = {n: p.expand(clients, *p.shape).clone().to(DEVICE) for n, p in network.params.items()}
    images = torch.randn(clients, 3, 3, 8, 8, device=DEVICE)
    client_keys, mask = torch.arange(clients, device=DEVICE), torch.ones(clients, 3, device=DEVICE)

    def sums(in_kernels: bool) -> Tree:
        with mock.patch.object(ops, "_multiplies_in_triton", lambda _: in_kernels):
            model = private_model(network.stacked, network.module)
            logits, notes = model(params, images, client_keys, mask)
            return notes.clipped_sums(logits.square().mean(2), mask, 0.1)

    torch.testing.assert_close(sums(True), sums(False), rtol=1e-4, atol=1e-5)
    print("clipping agrees")


def of_clients() -> None:
    """Noise by key, and rows made shorter, of which one is not finite."""
    for seed, count in ((0, 1), (1, 2501), (-1, 2048), (2**40, 4097)):
        expected = keys.normals(torch.tensor(seed, device=DEVICE), count)
        found = private.normals(seed, count, torch.device(DEVICE))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    rows = torch.randn(3, 1500, device=DEVICE, dtype=torch.float64)
    rows[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    factors = torch.tensor([0.3, 0.0, 1.0], device=DEVICE, dtype=torch.float64)
    expected = (rows * factors[:, None]).nan_to_num(0.0)
    private.shorten_(rows, factors)
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)
    print("privacy of clients agrees")


def main() -> None:
    checks: list[Callable[[], None]] = [
        *(partial(convolutions, [name]) for name in CONVOLUTIONS),
        *(depthwise_convolutions, group_norms, batch_norms, networks, the_rest),
        partial(factors, batch=5, features=70, out=24, steps=3),
        partial(factors, batch=40, features=300, out=70, steps=2),  # several blocks of everything
        partial(small_layer, batch=5, features=70, out=24, relu=True),
        partial(small_layer, batch=64, features=130, out=72, relu=False),
        *(steps, noise, clipping, of_clients, order_statistics, row_products, distances),
    ]
    for check in my_part(checks):
        torch.manual_seed(0)  # what one draws does not depend on the others
        check()
    print("all agree")


if __name__ == "__main__":
    if DEVICE == "cpu":
        spare_repetition()
    main()
