"""Convolutions of many clients: against PyTorch's own, and the GPU's kernels by interpretation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedlens.models import MODELS
from fedlens.network.kernels import convolution as kernels
from fedlens.network.ops import convolve, linear

CASES = {
    "first layer": (3, 8, 5, (2, 2, 2, 2)),
    "valid": (16, 8, 3, (0, 0, 0, 0)),
    "same, even kernel": (4, 6, 4, (1, 2, 1, 2)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_each_client_gets_its_own_convolution_and_gradients(case, has_bias):
    channels, out, size, padding = case
    clients, batch = 3, 2
    torch.default_generator.manual_seed(0)
    x = torch.randn(clients * batch, channels, 9, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(clients, out, channels, size, size, dtype=torch.float64)
    bias = torch.randn(clients, out, dtype=torch.float64) if has_bias else None
    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    found = convolve(x, weight, bias, padding)
    expected = torch.cat(
        [
            F.conv2d(F.pad(images, padding), weight[k], None if bias is None else bias[k])
            for k, images in enumerate(x.split(batch))
        ]
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((found * pull).sum(), leaves),
        torch.autograd.grad((expected * pull).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_bias", [True, False])
def test_each_client_gets_its_own_linear_layer_and_gradients(has_bias):
    torch.default_generator.manual_seed(0)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    weight = torch.randn(3, 6, 5, dtype=torch.float64)
    bias = torch.randn(3, 6, dtype=torch.float64) if has_bias else None
    leaves = tuple(t.requires_grad_() for t in (x, weight, bias) if t is not None)
    biases = [None] * 3 if bias is None else bias
    expected = torch.stack([F.linear(a, w, b) for a, w, b in zip(x, weight, biases, strict=True)])
    torch.testing.assert_close(linear(x, weight, bias), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *t: linear(*t, *[None] * (3 - len(t))), leaves)


def output(script: str, **settings: str) -> str:
    """What a script beside this file prints, in a process of its own."""
    command = [sys.executable, "-m", f"tests.network.{script}"]
    environment, root = {**os.environ, **settings}, Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=root, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_gpu_kernels_agree_with_plain_layers_when_interpreted():
    assert output("interpreted_kernels", TRITON_INTERPRET="1").endswith("all agree\n")


@pytest.mark.slow
def test_whole_rounds_by_the_gpu_kernels_agree_with_plain_ones_when_interpreted():
    assert output("interpreted_rounds", TRITON_INTERPRET="1").endswith("all agree\n")


@pytest.mark.slow
def test_every_gpu_kernel_compiles(pytestconfig):
    """Those that are as they were when the tests ran last are found in Triton's own cache."""
    compiled_before = pytestconfig.cache.mkdir("triton")
    compiled = output("compiled_kernels", TRITON_CACHE_DIR=str(compiled_before)).split()
    source = Path(kernels.__file__).parent
    launched = {
        f"fedlens.network.kernels.{file.stem}.{name}"
        for file in source.glob("*.py")
        for name in re.findall(r"(_\w+_kernel)\[", file.read_text())
    }
    assert launched and launched <= set(compiled)


@pytest.mark.long
def test_a_round_of_every_network_compiles(pytestconfig):
    compiled_before = pytestconfig.cache.mkdir("triton")
    lines = output("compiled_rounds", TRITON_CACHE_DIR=str(compiled_before)).splitlines()
    assert len(lines) == 2 * len(MODELS), "in bfloat16 and in float32"
