"""Fused layers are what the layers are one by one."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fedlens.algorithm import Algorithm
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithm.slots import LocalStep
from fedlens.engines import Sequential
from fedlens.network.network import Network
from fedlens.network.single import winograd
from fedlens.network.single.layers import FastPath, FusedConvolution, Linear, fuse
from fedlens.network.stacked.layers import read_module
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram
from tests.federations import assert_equal, noisy_images, small_cnn

CHAINS = {
    "relu": [nn.Conv2d(3, 5, 3), nn.ReLU()],
    "relu, pool": [nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
    "pool, relu": [nn.Conv2d(3, 5, 3, stride=2), nn.MaxPool2d(2), nn.ReLU(inplace=True)],
    "overlapping windows": [nn.Conv2d(3, 5, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)],
    "rounded up": [nn.Conv2d(3, 5, 2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)],
    "valid, no bias": [nn.Conv2d(3, 5, 3, padding="valid", bias=False), nn.ReLU()],
    "groups": [nn.Conv2d(3, 6, 3, groups=3, dilation=2), nn.ReLU(), nn.MaxPool2d((2, 1))],
}


def fused(module: nn.Module) -> nn.Module:
    read = read_module(module)
    assert read is not None
    return fuse(module, read.nodes)


def num_fused(module: nn.Module) -> int:
    return sum(isinstance(m, FusedConvolution) for m in module.modules())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("chain", CHAINS)
def test_result_and_gradients_are_those_of_the_plain_layers(chain, layout):
    torch.default_generator.manual_seed(0)
    plain = nn.Sequential(*CHAINS[chain]).double()
    other = fused(plain)
    assert num_fused(other) == 1
    images = torch.randn(4, 3, 12, 11, dtype=torch.float64).contiguous(memory_format=layout)
    results = []
    for module in (plain, other):
        x = images.clone(memory_format=torch.preserve_format).requires_grad_()
        y = module(x)
        wanted = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()
        results.append([y, *torch.autograd.grad(wanted, [x, *module.parameters()])])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)


def test_the_names_of_parameters_stay():
    plain = nn.Sequential(*CHAINS["relu, pool"], nn.Flatten(), nn.Linear(5 * 36, 2))
    assert list(fused(plain).state_dict()) == list(plain.state_dict())


def test_a_layer_used_twice_is_left_alone():
    relu = nn.ReLU()
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), relu, nn.Conv2d(3, 3, 1), relu)
    assert fused(plain) is plain


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(x)
        z: torch.Tensor = self.relu(y) + y
        return z


def test_a_result_that_is_read_twice_is_kept():
    assert num_fused(fused(Residual())) == 0


def test_a_network_runs_fused_layers_beside_the_module_it_was_given():
    network = Network(nn.Sequential(*CHAINS["relu, pool"], nn.Flatten(), nn.Linear(180, 2)))
    assert num_fused(network._functional.module) == 1 and num_fused(network.module) == 0


def plain_cnn() -> nn.Sequential:
    torch.default_generator.manual_seed(0)
    layers = nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(96, 4))


def one_step(module: nn.Module, solve: Sgd) -> dict[str, torch.Tensor]:
    """The parameters after one step of a client on the fast path."""
    return step_of(Network(module, dtype=torch.float64), solve)


def step_of(network: Network, solve: Sgd) -> dict[str, torch.Tensor]:
    federation = noisy_images([8])
    algorithm = Algorithm(Uniformly(1), Epochs(1, 8), solve=solve)
    program = ClientProgram(algorithm, network.layout)
    engine = Sequential(network, federation.examples, fast=True)
    state = begin(network, program, federation, torch.device("cpu"))
    state, _ = run_round(program, federation, engine, state, seed=0)
    return dict(state.params)


@pytest.mark.parametrize("make", [plain_cnn, small_cnn])
def test_layers_that_take_their_step_themselves_end_where_gradients_lead(make):
    # A momentum that has not gathered yet: the same step, by way of the gradients.
    expected = one_step(make(), Sgd(0.1, momentum=0.5))
    for name, value in one_step(make(), Sgd(0.1)).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)


def given_once(module: nn.Module, lr: float | None) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The gradients of a network's parameters after one batch, and the parameters themselves."""
    network = Network(module, dtype=torch.float64)
    params = {name: p[None].requires_grad_() for name, p in network.params.items()}
    images, keys, mask = (
        torch.rand(1, 2, 1, 8, 8),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1, 2),
    )
    logits, _ = network.fast(lr)(params, {}, images, keys, mask)
    grads = torch.autograd.grad(logits.square().sum(), list(params.values()), allow_unused=True)
    return list(grads), params


def test_only_layers_with_an_lr_keep_their_gradients_to_themselves():
    grads, params = given_once(plain_cnn(), None)
    start = Network(plain_cnn(), dtype=torch.float64).params
    assert all(g is not None for g in grads)
    assert all(torch.equal(params[name][0], value) for name, value in start.items())
    grads, params = given_once(plain_cnn(), 0.1)
    assert all(g is None for g in grads)
    assert not any(torch.equal(params[name][0], value) for name, value in start.items())


def test_a_model_says_whether_its_layers_take_their_own_steps():
    network = Network(plain_cnn())
    assert network.fast(0.1).takes_steps and not network.fast(None).takes_steps
    assert not network.single.takes_steps and not network.stacked.takes_steps
    # Weights that are cast before they are multiplied are not where a layer could step.
    assert not Network(plain_cnn(), compute=torch.bfloat16).fast(0.1).takes_steps


def test_frozen_weights_stay_where_they_are():
    module = plain_cnn()
    for p in module[0].parameters():
        p.requires_grad_(False)
    network = Network(module, dtype=torch.float64)
    before = {name: t.clone() for name, t in network.frozen.items()}
    assert before and set(step_of(network, Sgd(0.1))).isdisjoint(before)
    assert_equal(found=network.frozen, expected=before)


def test_a_large_linear_layer_gives_what_a_plain_one_gives():
    torch.default_generator.manual_seed(0)
    x = torch.randn(5, 1024, requires_grad=True)
    module = nn.Linear(1024, 256)
    expected = module(x)
    grads = torch.autograd.grad(expected.square().sum(), x)
    layer = Linear(module)
    layer.fast = FastPath(lr=0.0)
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    again = torch.autograd.grad(found.square().sum(), x)
    torch.testing.assert_close(again, grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "solve", [Sgd(0.1, weight_decay=0.1), Sgd(0.1, momentum=0.9), Sgd(torch.tensor([0.1]))]
)
def test_only_a_plain_step_is_taken_by_layers_themselves(solve):
    for chosen, takes in ((solve, False), (Sgd(0.1), True)):
        step = Algorithm(solve=chosen).local_step
        assert step is not None
        assert (step.is_plain and not isinstance(step.lr, torch.Tensor)) is takes


def test_a_penalty_has_a_gradient_of_its_own():
    plain = Algorithm(solve=Sgd(0.1))
    assert plain.local_step == LocalStep(0.1)
    more = plain.objective.plus(lambda _: torch.zeros(1))
    assert replace(plain, objective=more).local_step is None


def test_evaluation_computes_kernels_of_five_rows_with_fewer_products():
    torch.default_generator.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.ReLU(), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.Conv2d(64, 64, 3),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    network = Network(module, dtype=torch.float64)
    images = torch.rand(40, 3, 20, 20, dtype=torch.float64)
    plain = network.predict(network.params, {}, images)
    with mock.patch.object(winograd, "convolve", wraps=winograd.convolve) as convolve:
        fast = network.predict(network.params, {}, images, fast=True)
    assert {call.args[1].shape[2] for call in convolve.call_args_list} == {5}
    torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-9)
