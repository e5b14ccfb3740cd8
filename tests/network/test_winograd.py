"""Convolutions with fewer products are the plain ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.network.network import Network
from fedlens.network.single import winograd

SHAPES = {  # size, channels, height and width, out, kernel, padding
    "rows fill the tiles": (2, 3, (16, 9), 4, (5, 5), (2, 2)),
    "rows to spare": (2, 3, (9, 8), 4, (5, 3), (1, 1)),
    "fewer rows than a tile": (3, 2, (5, 7), 2, (5, 5), (1, 0)),
    "much padding": (1, 2, (6, 6), 3, (5, 3), (4, 2)),
    "taller than wide": (2, 3, (11, 6), 4, (5, 1), (0, 0)),
}


def batch(shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Images, weights and biases."""
    size, channels, pixels, out, kernel, _ = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, channels, *pixels, generator=generator, dtype=dtype)
    weight = torch.randn(out, channels, *kernel, generator=generator, dtype=dtype)
    bias = torch.randn(out, generator=generator, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last), weight, bias


@pytest.mark.parametrize("name", SHAPES)
def test_result_and_gradients_are_those_of_the_plain_convolution(name):
    padding = SHAPES[name][-1]
    x, weight, bias = (t.requires_grad_() for t in batch(SHAPES[name], torch.float64))
    plain = F.conv2d(x, weight, bias, padding=padding)
    grad = torch.linspace(-1, 1, plain.numel(), dtype=torch.float64).view(plain.shape)
    expected = torch.autograd.grad(plain, (x, weight), grad)
    with torch.no_grad():
        result, seen = winograd.convolve(x, weight, padding)
        result += bias[:, None, None]
        found = winograd.gradients(grad, x, seen, weight, padding, first=False)
        images, _ = winograd.gradients(grad, x, seen, weight, padding, first=True)
    assert images is None
    for one, two in zip((result, *found), (plain, *expected), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


def test_in_float32_the_error_is_a_few_times_that_of_the_plain_convolution():
    shape = (4, 32, (16, 12), 32, (5, 5), (0, 0))
    x, weight, _ = batch(shape, torch.float32)
    exact = F.conv2d(x.double(), weight.double())
    plain = (F.conv2d(x, weight) - exact).norm()
    assert (winograd.convolve(x, weight, (0, 0))[0] - exact).norm() < 5 * plain


@pytest.mark.parametrize(
    ("shape", "geometry", "suits"),
    [
        ((64, 64, (16, 16), 64, (5, 5), ()), ((1, 1), (2, 2), (1, 1), 1), True),
        ((64, 64, (16, 16), 64, (5, 5), ()), ((2, 2), (2, 2), (1, 1), 1), False),
        ((64, 64, (16, 16), 64, (5, 5), ()), ((1, 1), (2, 2), (2, 2), 1), False),
        ((64, 3, (16, 16), 64, (5, 5), ()), ((1, 1), (2, 2), (1, 1), 1), False),
        ((2, 64, (4, 4), 64, (5, 5), ()), ((1, 1), (2, 2), (1, 1), 1), False),
        ((64, 64, (16, 16), 64, (7, 7), ()), ((1, 1), (3, 3), (1, 1), 1), False),
        ((64, 64, (16, 16), 64, (3, 3), ()), ((1, 1), (1, 1), (1, 1), 1), False),
        ((64, 64, (3, 3), 64, (5, 5), ()), ((1, 1), (0, 0), (1, 1), 1), False),
    ],
)
def test_only_where_many_products_are_spared(shape, geometry, suits):
    x, weight, _ = batch(shape, torch.float32)
    assert winograd.suits(x, weight, geometry) is suits
    assert not winograd.suits(x.contiguous(), weight, geometry)


def test_the_fast_path_of_a_network_gives_what_the_plain_module_gives():
    module = nn.Sequential(
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    )
    network = Network(module, dtype=torch.float64)
    images = torch.rand(1, 8, 32, 8, 8, dtype=torch.float64)
    lone = {name: p[None] for name, p in network.params.items()}
    rest = images, torch.zeros(1, dtype=torch.int64), torch.ones(1, 8)
    plain, _ = network.single(lone, {}, *rest)
    fast, _ = network.fast(None)(lone, {}, *rest)
    assert not torch.equal(plain, fast)
    torch.testing.assert_close(fast, plain, rtol=1e-11, atol=1e-12)


def test_kernels_in_another_order_of_memory_are_the_same_kernels():
    network = Network(nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)))
    params = {name: p[None] for name, p in network.params.items()}
    other = network.lay_out_single(params)
    assert all(torch.equal(other[name], p) for name, p in params.items())
    assert other["0.weight"][0].permute(2, 0, 3, 1).is_contiguous()
    assert other["3.weight"] is params["3.weight"]
