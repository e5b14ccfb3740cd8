"""Triton kernels of convolutions beside plain PyTorch: a part of `interpreted_kernels.py`."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from fedlens.network.kernels import convolution_gradient, functions
from fedlens.network.layers import LANES, keyed_dropout
from fedlens.network.pool import Windows
from fedlens.network.stacked import products
from fedlens.network.stacked.epilogue import KeyedMask
from tests.network.agreeing import DEVICE, agree, compare, last, whole

CONVOLUTIONS = {  # channels, out, size, padding, stride, relu, pool
    "first layer": (3, 8, 5, (2, 2, 2, 2), (1, 1), True, Windows()),
    "valid": (16, 8, 3, (0, 0, 0, 0), (1, 1), True, None),
    "odd, no activation": (4, 20, 4, (1, 2, 1, 2), (1, 1), False, None),
    "stride": (16, 32, 3, (1, 1, 1, 1), (2, 2), True, None),
    "stride, few outs": (16, 12, 3, (1, 1, 1, 1), (2, 2), False, None),
    "stride larger than the kernel, few channels": (5, 16, 2, (1, 0, 1, 2), (3, 2), False, None),
    "padded, many channels": (32, 16, 5, (2, 2, 2, 2), (1, 1), True, Windows()),
    "many channels, sides differ": (64, 8, 3, (0, 1, 1, 0), (1, 1), False, None),
    "wider than a tile, no padding": (144, 136, 1, (0, 0, 0, 0), (1, 1), True, None),
    "wider than a tile": (144, 136, 2, (0, 1, 0, 0), (1, 1), True, None),
    "more padding than kernel": (8, 16, 2, (2, 2, 2, 2), (1, 1), True, None),
    "more padding than kernel, many channels": (16, 16, 3, (3, 3, 3, 3), (1, 1), False, None),
    "residual": (32, 24, 3, (1, 1, 1, 1), (1, 1), False, None),
    "more outs than channels": (16, 64, 2, (0, 1, 1, 0), (1, 1), False, None),
    "pool without relu, odd size": (8, 16, 2, (0, 0, 0, 0), (1, 1), False, Windows()),
    "padded pool, even and odd": (3, 8, 5, (1, 1, 2, 2), (1, 1), True, Windows(1, 1)),
    "padded pool, odd and even, by taps": (16, 8, 4, (0, 1, 1, 1), (1, 1), True, Windows(1, 1)),
    "padded pool, no padding, by taps": (16, 8, 2, (0, 0, 0, 0), (1, 1), False, Windows(1, 1)),
    "pool padded above, stride": (16, 16, 3, (1, 1, 1, 1), (2, 1), False, Windows(1, 0)),
    "pool padded beside, few channels": (5, 20, 3, (1, 0, 1, 1), (1, 2), True, Windows(0, 1)),
}
IN_PARTS = (
    "padded pool, even and odd",
    "wider than a tile",
)  # whose gradients of weights are added up


def convolutions(names: Iterable[str] = CONVOLUTIONS) -> None:
    clients, batch = 2, 2
    for name in names:
        channels, out, size, padding, stride, relu, pool = CONVOLUTIONS[name]
        # A client's pixels are two tiles, of which one is not full. Interpretation takes long.
        x = last(whole(clients * batch, channels, 8, 7)).requires_grad_()
        weight = whole(clients, out, channels, size, size).requires_grad_()
        has_bias = relu or pool is not None  # without, the grads are read as they come
        bias = whole(clients, out).requires_grad_() if has_bias else None
        found = functions.convolve(x, weight, bias, padding, stride, relu=relu, pool=pool)
        expected = products.apply(products.Convolve, x, weight, bias, padding, stride)
        expected = F.relu(expected) if relu else expected
        expected = expected if pool is None else pool.maxima(expected)
        parts = 2 if name in IN_PARTS else 1
        with mock.patch.object(convolution_gradient, "_splits", return_value=parts):
            compare(name, found, expected, {"x": x, "weight": weight, "bias": bias}, 1e-5)
            if bias is not None:
                first_layer(name, x.detach(), weight, bias, expected)
            if bias is not None and pool is not None and out % LANES == 0:
                dropped(name, x, weight, bias, expected)
            by_image(name, x.detach(), weight.detach(), None if bias is None else bias.detach())
        print(f"{name} agrees")


def by_image(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """With a tap, the gradients of every image: those of clients with one image each."""
    *_, padding, stride, relu, pool = CONVOLUTIONS[name]
    alive = torch.zeros((), device=DEVICE, requires_grad=True)
    noted: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    tap = alive, lambda dw, db: noted.append((dw, db))
    found = functions.convolve(x, weight, bias, padding, stride, relu=relu, pool=pool, tap=tap)
    pull = whole(*found.shape)
    torch.autograd.grad(found, alive, pull, allow_unused=True)
    ((dw, db),) = noted
    each = [
        t.repeat_interleave(len(x) // len(t), 0).requires_grad_()
        for t in (weight, bias)
        if t is not None
    ]
    y = products.apply(
        products.Convolve, x, *(each if bias is not None else (*each, None)), padding, stride
    )
    y = F.relu(y) if relu else y
    y = y if pool is None else pool.maxima(y)
    expected = torch.autograd.grad(y, each, pull)
    for one, other in zip((dw.permute(0, 4, 3, 1, 2), db), expected, strict=False):
        assert one is not None
        agree(f"{name}, of each image", one, other, 1e-5)


def dropped(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, expected: torch.Tensor
) -> None:
    """With dropout behind pooling, one half of the positions, so that the others are doubled."""
    *_, padding, stride, relu, pool = CONVOLUTIONS[name]
    clients = len(weight)
    keys = torch.tensor([12, -7], device=DEVICE)
    mask = KeyedMask(keys, 0.5, layer=3, call=1)
    by_client = expected.view(clients, -1, *expected.shape[1:])
    expected = keyed_dropout(by_client, keys, 0.5, 3, call=1).flatten(0, 1)
    follow: Any = {"relu": relu, "pool": pool, "mask": mask}
    found = functions.convolve(x, weight, bias, padding, stride, **follow)
    name = f"{name}, dropout"
    compare(name, found, expected, {"x": x, "weight": weight, "bias": bias}, 1e-5)
    first_layer(name, x.detach(), weight, bias, expected, mask)


def first_layer(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    expected: torch.Tensor,
    mask: KeyedMask | None = None,
) -> None:
    """Nobody asks for the grads of its images: those before ReLU and pooling are never stored.

    In bfloat16 the gradients of weights are still exact, for they are sums of small whole numbers.
    Interpretation knows no bfloat16.
    """
    *_, padding, stride, relu, pool = CONVOLUTIONS[name.removesuffix(", dropout")]
    follow: Any = {"relu": relu, "pool": pool, "mask": mask}
    dtype = expected.dtype if DEVICE == "cpu" else torch.bfloat16
    pull, leaves = whole(*expected.shape).to(dtype), (weight, bias)
    with mock.patch.object(functions, "UNSTORED", (dtype,)):
        found = functions.convolve(x.to(dtype), weight, bias, padding, stride, **follow)
        ours = torch.autograd.grad(found, leaves, pull)
    theirs = torch.autograd.grad(expected, leaves, pull.to(expected.dtype), retain_graph=True)
    agree(f"{name}, first", found.to(expected.dtype), expected, 1e-2)
    for what, one, other in zip(("weight", "bias"), ours, theirs, strict=True):
        agree(f"{name}, first, gradient of {what}", one, other, 1e-5)


DEPTHWISE = {  # channels, size, padding, stride, size of images
    "depthwise": (24, (3, 3), (1, 1, 1, 1), (1, 1), (6, 5)),
    "depthwise with stride, sides differ": (72, (3, 2), (0, 1, 1, 0), (2, 2), (7, 6)),
    "depthwise of one pixel": (20, (3, 3), (1, 1, 1, 1), (2, 1), (1, 1)),
}


def depthwise_convolutions(names: Iterable[str] = DEPTHWISE) -> None:
    clients, batch = 2, 3
    for name in names:
        channels, size, padding, stride, image = DEPTHWISE[name]
        for has_bias in (True, False):
            x = last(whole(clients * batch, channels, *image)).requires_grad_()
            weight = whole(clients, channels, 1, *size).requires_grad_()
            bias = whole(clients, channels).requires_grad_() if has_bias else None
            given = weight, bias, padding, stride
            found = functions.convolve_channels(x, *given)
            expected = products.grouped_convolve(x, *given, (1, 1), channels)
            compare(name, found, expected, {"x": x, "weight": weight, "bias": bias}, 1e-5)
        print(f"{name} agrees")
