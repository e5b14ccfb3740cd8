"""How the server moves: FedAvgM, FedAdam, FedYogi, FedAdagrad."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithm.slots import Advance
from fedlens.algorithms import fedadagrad, fedadam, fedavgm, fedyogi
from fedlens.core import Upload
from tests.conformance.quadratics import DOUBLE, close, end, follow, local_steps, path, plain, some
from tests.federations import assert_equal, train

BASE = Algorithm(select=Uniformly(4), draw=Epochs(2, batch_size=8), solve=Sgd(0.1, momentum=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("nesterov", [False, True])
def test_beta_of_zero_is_fedavg_byte_for_byte(dtype, nesterov):
    one, two = (
        train(a, rounds=3, dtype=dtype) for a in (BASE, compose(BASE, fedavgm(0.0, nesterov)))
    )
    assert_equal(found=two.params, expected=one.params)


@dataclass(frozen=True)
class AlwaysTheSame:
    """An upload that does not depend on the model."""

    def __call__(self, local):
        w = local.params["w"].double()
        return Upload({"w": torch.full_like(w, -0.5)})


@pytest.mark.parametrize("beta", [0.3, 0.9])
def test_a_constant_g_builds_up_a_velocity_of_g_times_one_minus_beta_to_the_t(beta):
    problem, g = some(3), 0.5
    algorithm = compose(replace(plain(3), upload=AlwaysTheSame()), fedavgm(beta))
    x = problem.start
    for t, (state, _) in enumerate(follow(algorithm, problem, 6), start=1):
        v = g * (1 - beta**t) / (1 - beta)
        close(state.server["velocity"]["w"], torch.full((1, 3), v, dtype=DOUBLE))
        x = x - v
        close(state.params["w"], x)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("lr", [1.0, 0.4])
def test_server_momentum_is_the_papers_formula(nesterov, lr):
    problem, beta = some(5), 0.8
    base = replace(plain(5, 0.1, epochs=2), advance=Sgd(lr))
    found = path(compose(base, fedavgm(beta, nesterov)), problem, 8)
    x, v = problem.start, torch.zeros(3, dtype=DOUBLE)
    for row in found:
        g = x - (problem.shares * local_steps(problem, x, 0.1, 2)).sum(0)
        v = beta * v + g
        x = x - lr * (g + beta * v if nesterov else v)
        close(row, x)


def test_round_one_is_not_dropped():
    """Some code only fills its velocity in round one, and first moves in round two."""
    problem = some(5)
    first = path(compose(plain(5, 0.1), fedavgm(0.9)), problem, 2)
    close(first[0], end(plain(5, 0.1), problem))
    dropped = torch.zeros(3, dtype=DOUBLE)  # what such code would have moved by
    assert (first[0] - problem.start - dropped).norm() > 0.01
    g0 = problem.start - first[0]
    g1 = 0.1 * problem.slope(first[0])
    close(first[1], first[0] - (0.9 * g0 + g1))
    forgot = first[0] - g1  # a velocity that starts in round two
    assert (first[1] - forgot).norm() > 0.01


def test_momentum_speeds_a_constant_slope_up_tenfold():
    """eta_eff = eta / (1 - beta)."""
    problem = some(2)
    algorithm = compose(replace(plain(2), upload=AlwaysTheSame()), fedavgm(0.9))
    found = path(algorithm, problem, 120)
    close(found[-1] - found[-2], torch.full((3,), -0.5 / (1 - 0.9), dtype=DOUBLE), 1e-4)


def adaptive(kind, problem, rounds, lr, beta1, beta2, tau):
    """Algorithm 2 of Reddi et al., in NumPy."""
    x = problem.start.numpy().copy()
    m, v = np.zeros(3), np.full(3, tau**2)
    rows = []
    for _ in range(rounds):
        local = local_steps(problem, torch.tensor(x), 0.1, 2)
        delta = ((local - torch.tensor(x)) * problem.shares).sum(0).numpy()
        m = beta1 * m + (1 - beta1) * delta
        if kind == "adagrad":
            v = beta2 * v + delta**2
        elif kind == "yogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        x = x + lr * m / (np.sqrt(v) + tau)
        rows.append(x)
    return torch.tensor(np.array(rows))


@pytest.mark.parametrize("tau", [1e-3, 0.1])
@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_adaptive_servers_are_the_papers_formulas(kind, tau):
    problem = some(5)
    made = {
        "adam": fedadam(0.05, 0.9, 0.99, tau),
        "yogi": fedyogi(0.05, 0.9, 0.99, tau),
        "adagrad": fedadagrad(0.05, tau=tau),
    }[kind]
    beta1, beta2 = (0.0, 1.0) if kind == "adagrad" else (0.9, 0.99)
    found = path(compose(plain(5, 0.1, epochs=2), made), problem, 12)
    close(found, adaptive(kind, problem, 12, 0.05, beta1, beta2, tau), 1e-11)


@dataclass(frozen=True)
class Adagrad(Advance):
    """Adagrad as it is without a beta2: v only grows."""

    lr: float
    tau: float

    def init(self, params):
        return {"v": {name: torch.full_like(p, self.tau**2) for name, p in params.items()}}

    def update(self, grads, memory, params, gathered):
        v = {name: memory["v"][name] + g.square() for name, g in grads.items()}
        moved = {n: p + self.lr * -grads[n] / (v[n].sqrt() + self.tau) for n, p in params.items()}
        return moved, {"v": v}


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_fedadagrad_keeps_all_squares_unless_told_otherwise_byte_for_byte(dtype):
    plain_sum = replace(BASE, advance=Adagrad(0.01, 1e-3))
    one, two = (train(a, rounds=3, dtype=dtype) for a in (plain_sum, compose(BASE, fedadagrad())))
    assert_equal(found=two.params, expected=one.params)


@pytest.mark.slow
@pytest.mark.parametrize("beta2", [0.0, 0.6, 1.0])
def test_a_constant_update_builds_up_squares_of_a_geometric_sum(beta2):
    """v = beta2^t tau^2 + d^2 (1 + ... + beta2^(t-1)); a step is lr d / (sqrt v + tau)."""
    problem, d, lr, tau = some(3), -0.5, 0.1, 0.2
    made = fedadagrad(lr, beta2=beta2, tau=tau)
    algorithm = compose(replace(plain(3), upload=AlwaysTheSame()), made)
    x = problem.start
    for t, (state, _) in enumerate(follow(algorithm, problem, 6), start=1):
        v = beta2**t * tau**2 + d**2 * sum(beta2**i for i in range(t))
        close(state.server["v"]["w"], torch.full((1, 3), v, dtype=DOUBLE))
        x = x + lr * d / (v**0.5 + tau)
        close(state.params["w"], x)


def test_there_is_no_bias_correction_and_v_starts_at_tau_squared():
    """So the first step is lr (1 - beta1) d / (sqrt(beta2 tau^2 + (1 - beta2) d^2) + tau)."""
    problem, tau = some(4), 0.05
    d = end(plain(4, 0.1), problem) - problem.start
    found = end(compose(plain(4, 0.1), fedadam(0.3, 0.9, 0.99, tau)), problem) - problem.start
    close(found, 0.3 * 0.1 * d / ((0.99 * tau**2 + 0.01 * d**2).sqrt() + tau))
    corrected = 0.3 * d / ((tau**2 + d**2).sqrt() + tau)
    assert (found - corrected).norm() > 0.01


def test_a_large_tau_makes_adagrad_and_yogi_fedavg():
    """v stays at tau^2, so a step is lr d / (2 tau). Adam's v forgets its start instead."""
    problem, tau = some(4), 1e6
    expected = end(plain(4), problem, 5)
    for made in (fedyogi(2 * tau, 0.0, 0.9, tau), fedadagrad(2 * tau, tau=tau)):
        close(end(compose(plain(4), made), problem, 5), expected, 1e-6)
    x = problem.start
    for t in range(1, 6):
        x = x - 2 / (0.9 ** (t / 2) + 1) * 0.1 * problem.slope(x)
    close(end(compose(plain(4), fedadam(2 * tau, 0.0, 0.9, tau)), problem, 5), x, 1e-6)


def test_numbers_out_of_range_are_refused():
    for wrong in (fedavgm(-0.1), fedavgm(1.0), fedadam(beta1=5.0), fedadam(beta2=-1.0)):
        with pytest.raises(ValueError, match="choose a number from 0 to below 1"):
            compose(BASE, wrong)
    for wrong in (fedadagrad(beta2=1.1), fedadagrad(beta2=-0.1)):
        with pytest.raises(ValueError, match="beta2"):
            compose(BASE, wrong)
    for wrong in (fedadam(lr=-1.0), fedadam(tau=0.0)):
        with pytest.raises(ValueError, match=r"choose .* or more"):
            compose(BASE, wrong)
    with pytest.raises(ValueError, match=r"server\.lr"):
        compose(replace(BASE, advance=Sgd(0.5)), fedadam())
