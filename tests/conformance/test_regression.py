"""ADMM on linear and on logistic regression, where its theory holds: it finds the optimum."""

import pytest
import torch
from torch import nn

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Objective, Uniformly, cross_entropy, squared_error
from fedlens.algorithms.liadmm import liadmm
from fedlens.engines import Sequential
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram
from tests.federations import CPU, noisy_images

SIZES = [4, 9, 14, 20]


def gradient(params, federation, loss, decay):
    """Of the loss on all examples at once."""
    weight = params["1.weight"].clone().requires_grad_()
    images, labels = federation.examples.images.flatten(1), federation.examples.labels
    total = loss((images @ weight.T)[None], labels[None]).mean() + decay / 2 * weight.square().sum()
    return torch.autograd.grad(total, weight)[0]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [squared_error, cross_entropy])
def test_liadmm_reaches_the_optimum_of_all_clients_data(loss):
    federation = noisy_images(SIZES)
    images = federation.examples.images.flatten(1)
    network = Network(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4, bias=False)), dtype=torch.float64
    )
    steepest = max(
        float(torch.linalg.matrix_norm(x.T @ x / len(x), 2)) for x in images.split(SIZES)
    )
    decay = steepest / 4  # well conditioned, and with one optimum

    def penalty(local):
        return decay / 2 * local.params["1.weight"].flatten(1).square().sum(1)

    base = Algorithm(Uniformly(4), Epochs(1, 8), Objective(loss).plus(penalty))
    algorithm = compose(base, liadmm(gamma=0.3 / (steepest + decay)))
    program = ClientProgram(algorithm, network.layout)
    engine = Sequential(network, federation.examples)
    state = begin(network, program, federation, CPU)
    before = gradient(state.params, federation, loss, decay).norm()
    for _ in range(300):
        state, _ = run_round(program, federation, engine, state, seed=0)
    assert gradient(state.params, federation, loss, decay).norm() < 1e-6 * before
