"""ADMM, CEADMM and FedADMM, by their own mathematics; and `double_softmax`."""

import math
from dataclasses import replace

import pytest
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly, double_softmax
from fedlens.algorithm.pieces.consensus import change
from fedlens.algorithms import admm, ceadmm, fedadmm, fedavgm, fedprox
from fedlens.core import keys, zeros_like
from fedlens.engines import Sequential
from fedlens.fleet import payload
from fedlens.network.network import Network
from fedlens.rounds import ClientMemory, begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.cohorts import SELECT
from tests.conformance.quadratics import (
    DOUBLE,
    Point,
    Quadratics,
    close,
    end,
    error,
    follow,
    path,
    plain,
    rounds_of,
    some,
)
from tests.federations import CPU, assert_equal, noisy_images, small_cnn, train

SOLVED = 60  # epochs that solve a quadratic of curvature 0.5 + rho or more at lr 0.4


def exact_admm(problem, rho, rounds, k0=1):
    """Zhou and Li's eqs 2.16 (and 3.1 to 3.3 for k0 > 1), unscaled, in closed form."""
    x, pi = problem.start, torch.zeros_like(problem.a)
    w, sigma = problem.shares, rho * problem.shares
    rows, duals = [], []
    for _ in range(rounds):
        for _ in range(k0):
            # 0 = w f'(v) + pi + sigma (v - x)
            v = (w * problem.a * problem.c - pi + sigma * x) / (w * problem.a + sigma)
            pi = pi + sigma * (v - x)
        x = (sigma * v + pi).sum(0) / sigma.sum()
        rows.append(x)
        duals.append(pi)
    return torch.stack(rows), duals[-1]


@pytest.mark.parametrize("rho", [0.3, 1.0])
def test_admm_with_solved_problems_is_the_closed_form(rho):
    problem = some(4)
    algorithm = compose(plain(4, 0.4, SOLVED), admm(rho))
    states = [state for state, _ in follow(algorithm, problem, 6)]
    rows, pi = exact_admm(problem, rho, 6)
    close(torch.stack([state.params["w"] for state in states]), rows, 1e-9)
    for client, row in states[-1].clients.rows.items():
        close(rho * problem.shares[client] * row["dual"]["w"], pi[client], 1e-9)


@pytest.mark.slow
def test_ceadmm_moves_its_dual_k0_times_between_communications():
    problem = some(4)
    found = path(compose(plain(4, 0.4, SOLVED), ceadmm(0.5, k0=3)), problem, 4)
    close(found, exact_admm(problem, 0.5, 4, k0=3)[0], 1e-9)
    once = exact_admm(problem, 0.5, 4)[0]
    assert (found - once).norm() > 1e-2


def test_ceadmm_with_k0_of_one_is_admm_byte_for_byte():
    base = Algorithm(Uniformly(4), Epochs(2, 8), solve=Sgd(0.1, 0.5))
    one, two = (train(compose(base, a), rounds=3) for a in (admm(0.2), ceadmm(0.2, k0=1)))
    assert_equal(found=two.params, expected=one.params)


@pytest.mark.slow
@pytest.mark.parametrize("made", [admm(1.0), ceadmm(1.0, k0=2), fedadmm(1.0)])
def test_a_fixed_point_is_the_optimum_and_the_duals_are_the_gradients(made):
    problem = some(5)
    *_, (state, outcome) = follow(compose(plain(5, 0.4, 3), made), problem, 60)
    x = state.params["w"]
    assert error(x, problem.optimum) < 1e-10
    pi = torch.stack([1.0 * state.clients.rows[k]["dual"]["w"] for k in range(5)])  # over w_i
    close(pi, -problem.slopes(x), 1e-8)
    assert (problem.shares * pi).sum(0).norm() < 1e-8
    assert float(outcome.scalars["primal_residual"]) < 1e-18
    assert float(outcome.scalars["dual_residual"]) < 1e-9


def test_fedavg_with_as_many_steps_misses_the_optimum():
    problem = some(5)
    assert error(end(plain(5, 0.4, 3), problem, 60), problem.optimum) > 1e-2


@pytest.mark.slow
def test_few_clients_a_round_reach_the_optimum():
    """2 of 8 a round, three local steps: FedADMM gets there, FedAvg does not."""
    problem = some(8)
    for start in ("warm", "cold"):
        algorithm = compose(plain(2, 0.4, 3), fedadmm(1.0, start=start))
        assert error(end(algorithm, problem, 150), problem.optimum) < 1e-6
    assert error(end(plain(2, 0.4, 3), problem, 60), problem.optimum) > 1e-2


def seen_mean(problem, state, start=None):
    """The weighted mean of z_i from clients' memory; of clients not seen z_i is `start`."""
    total, weight = torch.zeros(3, dtype=DOUBLE), 0
    for client, size in enumerate(problem.sizes.tolist()):
        row = state.clients.rows.get(client)
        if row is None and start is None:
            continue
        total += size * (start if row is None else row["z"]["w"])
        weight += size
    return total / weight


def test_adding_changes_up_keeps_the_mean_of_all_z():
    problem = some(9)
    for state, _ in follow(compose(plain(3, 0.2, 4), fedadmm(0.6, start="cold")), problem, 12):
        close(state.params["w"], seen_mean(problem, state, problem.start))


def test_a_warm_start_is_the_mean_of_the_z_seen_so_far():
    problem = some(9)
    for state, _ in follow(compose(plain(2, 0.2, 4), fedadmm(0.6)), problem, 12):
        close(state.params["w"], seen_mean(problem, state))


def test_a_cold_start_moves_only_as_far_as_clients_were_seen():
    problem = some(10, equal=True)
    warm, cold = (
        end(compose(plain(1, 0.2, 4), fedadmm(0.6, start=s)), problem) for s in ("warm", "cold")
    )
    close(cold - problem.start, (warm - problem.start) / 10)


def test_once_everyone_was_seen_in_round_one_warm_and_cold_are_the_same():
    problem = some(4)
    warm, cold = (
        path(compose(plain(4, 0.2, 4), fedadmm(0.6, start=s)), problem, 5) for s in ("warm", "cold")
    )
    close(warm, cold)


def test_a_cold_start_is_gongs_fedadmm_with_a_server_step_of_the_share_sampled():
    """theta += (eta / |S|) sum of changes of w_i + y_i / rho, eta = |S| / m, for equal sizes."""
    problem, rho, m = some(6, equal=True), 0.7, 6
    theta = problem.start
    w, y = theta.repeat(m, 1), torch.zeros(m, 3, dtype=DOUBLE)
    for state, _ in follow(compose(plain(2, 0.4, SOLVED), fedadmm(rho, start="cold")), problem, 8):
        drawn = Uniformly(2)(problem.federation, 0, select_key(state.round - 1))
        before = w + y / rho
        # 0 = f'(w) + y + rho (w - theta)
        solved = (problem.a * problem.c - y + rho * theta) / (problem.a + rho)
        w[drawn] = solved[drawn]
        y[drawn] += rho * (solved - theta)[drawn]
        theta = theta + (w + y / rho - before)[drawn].sum(0) / m
        close(state.params["w"], theta, 1e-9)


def select_key(round):
    return keys.fold(keys.root(0), SELECT, round)


def apart(local):
    return {name: v - local.anchor[name] for name, v in local.params.items()}


def frozen(local):
    """What a client sends whose dual stays at zero."""
    return change(local, local.params, apart(local), zeros_like(local.params), local.memory["z"])


def test_with_the_dual_frozen_it_is_fedprox():
    base = Algorithm(Uniformly(10), Epochs(2, 8), solve=Sgd(0.1, 0.5))
    one = train(compose(base, fedprox(0.4)), rounds=3)
    two = train(replace(compose(base, admm(0.4)), upload=frozen), rounds=3)
    for name, p in one.params.items():
        close(two.params[name], p, 1e-11)


def test_with_the_dual_frozen_and_rho_of_zero_it_is_fedavg():
    base = Algorithm(Uniformly(10), Epochs(2, 8), solve=Sgd(0.1, 0.5))
    one = train(base, rounds=3)
    two = train(replace(compose(base, admm(0.0)), upload=frozen), rounds=3)
    for name, p in one.params.items():
        close(two.params[name], p, 1e-13)


def test_the_first_round_moves_twice_as_far_as_fedproxs():
    """u = 0 then, so v is FedProx's; and z = v + u+ = 2 v - x."""
    problem = some(5)
    x = problem.start
    prox = end(compose(plain(5, 0.2, 4), fedprox(0.6)), problem)
    ((state, _),) = follow(compose(plain(5, 0.2, 4), admm(0.6)), problem, 1)
    close(state.params["w"] - x, 2 * (prox - x))
    v = torch.stack([r["z"]["w"] - r["dual"]["w"] for _, r in sorted(state.clients.rows.items())])
    close((problem.shares * v).sum(0), prox)


@pytest.mark.slow
def test_the_result_does_not_depend_on_how_unlike_the_clients_are():
    """The same pooled problem, dealt to clients whose minima lie near each other or far apart."""
    near = some(6, spread=0.1)
    away = 50 * torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    away -= (near.shares * near.a * away).sum(0) / (near.shares * near.a).sum(0)
    far = Quadratics(near.a, near.c + away, near.sizes, near.start)
    close(far.optimum, near.optimum, 1e-9)
    for problem in (near, far):
        found = end(compose(plain(6, 0.4, 3), fedadmm(1.0)), problem, 60)
        assert (found - near.optimum).norm() < 1e-9
    assert (end(plain(6, 0.4, 3), far, 60) - far.optimum).norm() > 1


def with_theta(local):
    """The public FedADMM code: its update message takes theta for the client's last model."""
    u = local.memory["dual"]
    dual = {name: u[name] + moved for name, moved in apart(local).items()}
    last = {name: local.anchor[name] + u[name] for name in u}
    return change(local, local.params, apart(local), dual, last)


@pytest.mark.slow
def test_the_fault_of_public_fedadmm_makes_every_point_a_fixed_point_and_is_not_ours():
    """Where all duals are the gradients of some theta that is no optimum, it stays; ours leaves."""
    problem, rho = some(4), 1.0
    theta = problem.optimum + 1.0
    dual = -problem.slopes(theta) / rho
    rows = {k: {"dual": {"w": dual[k]}, "z": {"w": theta + dual[k]}} for k in range(4)}
    right = compose(plain(4, 0.4, 40), admm(rho))
    faulty = replace(right, upload=with_theta)
    close(one_round_from(faulty, problem, theta, rows), theta, 1e-9)
    mean = (problem.shares * (theta + dual)).sum(0)  # of all z, where our server would stand
    assert (one_round_from(right, problem, mean, rows) - theta).norm() > 0.05

    short = replace(right, draw=Epochs(4, 1000))
    stalled, found = (end(a, problem, 60) for a in (replace(short, upload=with_theta), short))
    assert error(stalled, problem.optimum) > 0.01
    assert error(found, problem.optimum) < 1e-9


def one_round_from(algorithm, problem, x, rows):
    """The server's model after a round, from model x and these memories of the clients."""
    network = Network(Point(x), dtype=DOUBLE)
    program = ClientProgram(algorithm, network.layout)
    engine = Sequential(network, problem.federation.examples)
    state = replace(begin(network, program, problem.federation, CPU), clients=ClientMemory(rows))
    return run_round(program, problem.federation, engine, state, 0)[0].params["w"]


def test_a_server_that_does_not_just_take_the_mean_is_refused():
    """A server learning rate or momentum would lead to a point where duals do not sum to zero."""
    for made in (admm(0.5), fedadmm(0.5)):
        with pytest.raises(ValueError, match=r"server\.lr"):
            compose(replace(plain(4), advance=Sgd(0.5)), made)
        with pytest.raises(ValueError, match="advance"):
            compose(plain(4), made, fedavgm())
    problem = some(4)
    algorithm = replace(compose(plain(4, 0.4, 3), admm(1.0)), advance=Sgd(0.5))
    assert error(end(algorithm, problem, 60), problem.optimum) > 0.1


def test_residuals_are_what_they_say():
    problem, rho = some(4), 0.5
    before = problem.start
    for state, outcome in follow(compose(plain(4, 0.3, 5), admm(rho)), problem, 3):
        rows = [row for _, row in sorted(state.clients.rows.items())]
        v = torch.stack([row["z"]["w"] - row["dual"]["w"] for row in rows])
        primal = (problem.shares[:, 0] * (v - before).square().sum(1)).sum()
        close(outcome.scalars["primal_residual"], primal)
        close(outcome.scalars["dual_residual"], rho * (state.params["w"] - before).norm())
        before = state.params["w"]


def test_buffers_are_the_plain_average_and_never_dual():
    federation = noisy_images([12, 20, 8])
    base = Algorithm(Uniformly(2), Epochs(1, 8), solve=Sgd(0.0))
    one, warm, cold = (
        list(rounds_of(a, federation, small_cnn("batch"), 3))[-1][0]
        for a in (base, compose(base, fedadmm(0.1)), compose(base, admm(0.1)))
    )
    for name, b in one.buffers.items():
        torch.testing.assert_close(warm.buffers[name], b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(cold.buffers[name], b, rtol=1e-12, atol=1e-12)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="diverges with"):
        compose(plain(2, 0.1), admm(20.0))
    with pytest.raises(ValueError, match="rho is -1"):
        compose(plain(2, 0.1), fedadmm(-1.0))
    with pytest.raises(ValueError, match="k0 is 0"):
        compose(plain(2, 0.1), ceadmm(0.1, k0=0))


def test_double_softmax_lies_between_its_bounds():
    floor, ceiling = math.log(1 + 9 / math.e), math.log(math.e + 9)
    assert (round(floor, 4), round(ceiling, 4)) == (1.4612, 2.4612)
    rng = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(1, 500, 10, generator=rng, dtype=DOUBLE)
    labels = torch.randint(10, (1, 500), generator=rng)
    losses = double_softmax(logits, labels)
    assert losses.min() >= floor - 1e-12 and losses.max() <= ceiling + 1e-12
    sure = 1000 * torch.eye(10, dtype=DOUBLE)[None]
    right, wrong = torch.arange(10)[None], (torch.arange(10)[None] + 1) % 10
    close(double_softmax(sure, right), torch.full((1, 10), floor, dtype=DOUBLE))
    close(double_softmax(sure, wrong), torch.full((1, 10), ceiling, dtype=DOUBLE))


def test_a_saturated_constant_predictor_has_a_loss_of_2_3612_and_no_gradient():
    logits = torch.zeros(1, 10, 10, dtype=DOUBLE)
    logits[..., 0] = 1000
    logits.requires_grad_()
    loss = double_softmax(logits, torch.arange(10)[None]).mean()
    assert round(float(loss.detach()), 4) == 2.3612
    assert float(torch.autograd.grad(loss, logits)[0].abs().max()) == 0


def test_a_saturated_net_has_a_loss_of_the_floor_plus_its_errors():
    rng = torch.Generator().manual_seed(0)
    logits = 1e8 * torch.randn(1, 400, 10, generator=rng, dtype=DOUBLE)
    labels = torch.randint(10, (1, 400), generator=rng)
    accuracy = (logits.argmax(-1) == labels).double().mean()
    found = double_softmax(logits, labels).mean()
    close(found, math.log(1 + 9 / math.e) + 1 - accuracy, 1e-9)


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_the_first_model_is_sent_and_counted_in_every_round_if_clients_start_from_it(start):
    algorithm = compose(plain(2), fedadmm(start=start))
    _, (last, _), (_, outcome) = follow(algorithm, some(4), 3)
    assert list(last.told) == ["start"] * (start == "cold")
    sent = {"params": last.params, "buffers": last.buffers, "told": last.told}  # as a fleet does
    floats = sum(t.numel() for t in payload.flat(sent).values())
    assert floats == {"cold": 6, "warm": 3}[start]
    assert outcome.bytes_down == 2 * 4 * floats and outcome.bytes_up == 2 * 4 * 3
