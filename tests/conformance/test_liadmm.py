"""LIADMM and its communication-efficient variant, by their own mathematics."""

from dataclasses import replace

import pytest
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithms import celiadmm, fedprox, fedvc, liadmm
from fedlens.core import keys
from fedlens.rounds.cohorts import SELECT
from tests.conformance.quadratics import (
    DOUBLE,
    Quadratics,
    close,
    end,
    error,
    follow,
    path,
    plain,
    some,
)
from tests.federations import assert_equal, noisy_images, small_cnn, train


def equations(problem, gamma, rounds, signs=(1, -1, 1)):
    """Paper 4's eqs 4.4 to 4.6, unscaled, with the three signs they carry."""
    aggregate, local, dual = signs
    w = problem.shares
    x, pi = problem.start, torch.zeros_like(problem.a)
    models = x.expand_as(problem.a)
    rows = []
    for _ in range(rounds):
        x = (w * models + aggregate * gamma * pi).sum(0)
        models = x - gamma * problem.slopes(x) + local * gamma / w * pi
        pi = pi + dual * w / gamma * (models - x)
        rows.append(x)
    return torch.stack(rows)


def optimistic(problem, gamma, rounds):
    """x+ = x - 2 gamma f'(x) + gamma f'(x_before), with no slope before the first."""
    x, before, rows = problem.start, torch.zeros(3, dtype=DOUBLE), []
    for _ in range(rounds):
        slope = problem.slope(x)
        x, before = x - 2 * gamma * slope + gamma * before, slope
        rows.append(x)
    return torch.stack(rows)


def test_it_is_the_papers_equations_and_optimistic_gradient_descent_to_1e_10():
    problem = some(5)
    gamma = 0.4 / problem.most_curved
    found = path(compose(plain(5), liadmm(gamma)), problem, 30)
    close(found[:-1], equations(problem, gamma, 30)[1:], 1e-10)
    close(found, optimistic(problem, gamma, 30), 1e-10)


def test_one_client_is_optimistic_gradient_descent():
    problem = some(1)
    found = path(compose(plain(1), liadmm(0.3)), problem, 40)
    close(found, optimistic(problem, 0.3, 40), 1e-10)


def test_of_all_mixtures_of_signs_only_the_papers_and_its_mirror_converge():
    """And ours is the paper's. The formulas are those of this file; ours is compared above."""
    problem = some(5)
    gamma = 0.3 / problem.most_curved
    converges = {
        signs
        for signs in ((a, b, c) for a in (1, -1) for b in (1, -1) for c in (1, -1))
        if error(equations(problem, gamma, 400, signs)[-1], problem.optimum) < 1e-6
    }
    assert converges == {(1, -1, 1), (-1, 1, -1)}


@pytest.mark.slow
def test_at_gamma_l_of_three_tenths_it_reaches_the_optimum():
    """Ten clients, a condition number of 20: by the rate of the flattest direction."""
    problem = some(10)
    wanted = torch.tensor([0.1, 0.7, 2.0], dtype=DOUBLE)  # the curvatures of the weighted sum
    a = problem.a * wanted / (problem.shares * problem.a).sum(0)
    problem = replace(problem, a=a)
    algorithm = compose(plain(10), liadmm(0.3 / problem.most_curved))
    found = path(algorithm, problem, 400)
    early, late = (error(found[done - 1], problem.optimum) for done in (300, 400))
    product = 0.3 / 20
    rate = ((1 - 2 * product) + ((1 - 2 * product) ** 2 + 4 * product) ** 0.5) / 2
    assert late / early == pytest.approx(rate**100, rel=1e-6)
    assert late * rate**1600 < 1e-10, "after 2000 rounds"


@pytest.mark.slow
@pytest.mark.parametrize(("product", "converges"), [(0.66, True), (0.67, False), (0.7, False)])
def test_it_is_stable_below_gamma_l_of_two_thirds_and_not_above(product, converges):
    one = torch.ones(2, 1, dtype=DOUBLE)
    minima = torch.tensor([[1.0], [-3.0]], dtype=DOUBLE)
    problem = Quadratics(one, minima, torch.tensor([1, 1]), torch.zeros(1, dtype=DOUBLE))
    away = (path(compose(plain(2), liadmm(product)), problem, 200) - problem.optimum).abs()[:, 0]
    early, late = away[100:110].max(), away[190:].max()
    assert bool(late < early) is converges
    rate = ((1 - 2 * product) - ((1 - 2 * product) ** 2 + 4 * product) ** 0.5) / 2
    assert float(late / away[180:190].max()) == pytest.approx(abs(rate) ** 10, rel=1e-6)


def test_duals_are_the_gradients_at_the_model_sent_and_come_to_sum_to_zero():
    problem = some(5)
    gamma = 0.3 / problem.most_curved
    x, sums = problem.start, []
    for state, _ in follow(compose(plain(5), liadmm(gamma)), problem, 60):
        u = torch.stack([state.clients.rows[k]["dual"]["w"] for k in range(5)])
        pi = problem.shares / gamma * u
        close(pi, -problem.shares * problem.slopes(x), 1e-10)
        x = state.params["w"]
        sums.append(float(pi.sum(0).norm()))
    assert sums[-1] < 1e-3 * sums[0]


def test_a_step_adds_batches_up_so_that_a_client_need_not_fit_at_once():
    federation = noisy_images([20, 13, 7])
    one, two = (
        train(compose(Algorithm(Uniformly(3), Epochs(4, size)), liadmm(0.1)), federation=federation)
        for size in (3, 1000)
    )
    for name, p in one.params.items():
        close(two.params[name], p, 1e-11)


@pytest.mark.slow
def test_one_in_ten_sampled_reaches_the_optimum():
    """10 of 100 clients a round, for 800 rounds: the server keeps the z of all."""
    problem = some(100, spread=5)
    gamma = 0.3 / problem.most_curved
    assert error(end(compose(plain(10), liadmm(gamma)), problem, 800), problem.optimum) < 1e-6
    sampled = compose(plain(10), liadmm(gamma, average="sampled"))
    tail = path(sampled, problem, 150)[100:]
    assert min(error(x, problem.optimum) for x in tail) > 1e-4  # a noise floor


def test_the_rate_does_not_depend_on_how_unlike_the_clients_are():
    near, far = some(3, spread=0.1), some(3, spread=100)
    for problem in (near, far):
        gamma = 0.5 / problem.most_curved
        found = path(compose(plain(3), liadmm(gamma)), problem, 60)
        first, last = error(found[0], problem.optimum), error(found[-1], problem.optimum)
        assert last < 1e-5 * first


@pytest.mark.parametrize("lipschitz", [0.0, 1.5])
@pytest.mark.parametrize("clients", [5, 2])
def test_celiadmm_is_the_authors_iteration(lipschitz, clients):
    """X -= (sigma (X - y) + w f'(X) + pi) / (w r + sigma); pi += sigma (X - y), k0 times."""
    problem, gamma, k0 = some(5), 0.1, 3
    algorithm = compose(plain(clients), celiadmm(gamma, k0, lipschitz))
    y, pi = problem.start, torch.zeros_like(problem.a)
    w, sigma = problem.shares, problem.shares / gamma
    z = sigma * y
    for state, _ in follow(algorithm, problem, 5):
        for k in _cohort(problem, clients, state.round - 1):
            x = y
            for _ in range(k0):
                slope = sigma[k] * (x - y) + w[k] * problem.slopes(x)[k] + pi[k]
                x = x - slope / (w[k] * lipschitz + sigma[k])
                pi[k] += sigma[k] * (x - y)
            z[k] = sigma[k] * x + pi[k]
        y = z.sum(0) / sigma.sum()
        close(state.params["w"], y, 1e-10)


def _cohort(problem, clients, round):
    key = keys.fold(keys.root(0), SELECT, round)
    return Uniformly(clients)(problem.federation, round, key).tolist()


def test_celiadmm_with_k0_of_one_is_liadmm_byte_for_byte():
    base = Algorithm(Uniformly(4), Epochs(2, 8))
    one, two = (train(compose(base, a), rounds=3) for a in (liadmm(0.1), celiadmm(0.1, k0=1)))
    assert_equal(found=two.params, expected=one.params)


@pytest.mark.slow
def test_celiadmm_reaches_the_optimum_with_a_tenth_of_the_clients_a_round():
    """10 of 100, rho = 1 and ten local iterations. FedAvg with as many steps does not."""
    problem = some(100, spread=5)
    algorithm = compose(plain(10), celiadmm(1.0, 10, lipschitz=2.0))
    assert error(end(algorithm, problem, 200), problem.optimum) < 1e-6
    assert error(end(plain(10, 1 / 3, epochs=10), problem, 50), problem.optimum) > 1e-2


def test_gamma_is_the_local_learning_rate_unless_it_is_given():
    problem = some(3)
    close(
        end(compose(plain(3, 0.07), liadmm()), problem, 4),
        end(compose(plain(3, 0.5), liadmm(0.07)), problem, 4),
    )


def test_training_in_the_place_of_the_step_is_x_plus_2d_minus_d_before():
    """D the displacement of local training: with a gain near 1 instead of below 2/3, no fixed
    point attracts. So paper 4's LIADMM with long local training diverges."""
    problem = some(4)
    base = plain(4, 0.2, epochs=2)
    found = path(compose(base, liadmm(0.2, local="training")), problem, 10)
    x, before = problem.start, torch.zeros_like(problem.start)
    for row in found:
        moved = problem.shares * (problem.c + (1 - 0.2 * problem.a) ** 2 * (x - problem.c) - x)
        d = moved.sum(0)
        x, before = x + 2 * d - before, d
        close(row, x, 1e-10)
    long = compose(replace(base, draw=Epochs(15, 1000)), liadmm(0.2, local="training"))
    assert float(end(long, problem, 40).norm()) > 1e3


def test_the_dual_inside_every_step_or_epoch_is_subtracted_that_often():
    """From the second round on, when there is a dual: hypothesis 1 of why paper 4 fails."""
    problem, lr, epochs = some(1), 0.1, 3
    size = int(problem.sizes[0])
    (a,), (c,) = problem.a, problem.c
    for dual, every in (("step", 1), ("epoch", size)):
        base = plain(1, lr, epochs, batch_size=1)
        found = path(compose(base, liadmm(0.2, local="training", dual=dual)), problem, 3)
        x, u = problem.start, torch.zeros(3, dtype=DOUBLE)
        for row in found:
            v = x
            for step in range(1, epochs * size + 1):
                v = v - lr * a * (v - c)
                if step % every == 0:
                    v = v - u
            u = u + v - x
            x = v + u
            close(row, x, 1e-9)


@pytest.mark.parametrize("first", ["fedprox", "liadmm"])
def test_a_client_that_does_fewer_epochs_subtracts_the_dual_after_each_of_them(first):
    """A pass is three steps or fewer, of two examples; there is a dual from the second round on."""
    problem, lr, mu = some(4), 0.1, 0.2
    papers = [fedprox(mu, uneven=1.0), liadmm(0.2, local="training", dual="epoch")]
    base = plain(4, lr, epochs=4, batch_size=2)
    algorithm = compose(base, *(papers if first == "fedprox" else papers[::-1]))
    x, u, z = problem.start, torch.zeros_like(problem.a), problem.start.expand_as(problem.a)
    per_pass, done = (problem.sizes + 1) // 2, set()
    for number, row in enumerate(path(algorithm, problem, 3)):
        steps = _steps(algorithm, problem, number)
        v = x.repeat(4, 1)
        for k in range(4):
            for step in range(1, int(steps[k]) + 1):
                v[k] -= lr * (problem.a[k] * (v[k] - problem.c[k]) + mu * (v[k] - x))
                if step % per_pass[k] == 0:
                    v[k] -= u[k]
        u = u + v - x
        x = x + (problem.shares * (v + u - z)).sum(0)
        z = v + u
        done |= set((steps // per_pass).tolist())
        close(row, x, 1e-9)
    assert done == {1, 2, 3}


def _steps(algorithm, problem, round):  # [K]
    everyone = torch.arange(len(problem))
    drawn = keys.fold(keys.root(0), keys.purpose("client"), round, everyone, 0 * everyone)
    held = problem.federation.everyone(round)
    return algorithm.draw(held, keys.fold(drawn, keys.purpose("draw"))).steps


def test_passes_that_are_counted_cannot_be_left_out_whoever_comes_first():
    base, uneven = plain(3, epochs=5), fedprox(uneven=0.5)
    with pytest.raises(ValueError, match="whole"):
        compose(base, uneven, celiadmm(0.1, k0=5))
    with pytest.raises(ValueError, match="draw"):
        compose(base, celiadmm(0.1, k0=5), uneven)


def test_weights_of_the_dual_in_the_average_may_differ_from_the_primals():
    """Hypothesis 5: primal over the sampled, dual over all."""
    problem, gamma = some(3, equal=True), 0.2
    found = path(compose(plain(3), liadmm(gamma, dual_weight=0.5)), problem, 5)
    x, u = problem.start, torch.zeros_like(problem.a)
    for row in found:
        v = x - gamma * problem.slopes(x) - u
        u = u + v - x
        x = (problem.shares * (v + 0.5 * u)).sum(0)
        close(row, x, 1e-10)


def test_uploads_of_before_the_step_are_the_states_of_the_round_before():
    """x = sum of n_i (x_i + u_i) / n over the cohort, of when each of them last took part."""
    problem = some(5)
    stale = liadmm(0.2, local="training", average="sampled", upload="before")
    x, u, z = problem.start, torch.zeros_like(problem.a), problem.start.repeat(5, 1)
    trained = set()
    for state, _ in follow(compose(plain(2, 0.2), stale), problem, 12):
        cohort = _cohort(problem, 2, state.round - 1)
        shares = problem.shares[cohort] / problem.shares[cohort].sum()
        averaged = (shares * z[cohort]).sum(0)
        moved = -0.2 * problem.slopes(x)[cohort]
        z[cohort], u[cohort] = x + 2 * moved - u[cohort], moved
        x = averaged
        trained |= set(cohort)
        close(state.params["w"], x, 1e-9)
    assert len(trained) == 5


def test_the_model_after_a_first_round_of_stale_uploads_is_the_initial_one():
    base = Algorithm(Uniformly(3), Epochs(2, 8), solve=Sgd(0.1))
    stale = liadmm(0.1, local="training", average="sampled", upload="before")
    found = train(compose(base, stale), rounds=1)
    assert_equal(found=found.params, expected=train(base, rounds=0).params)


def test_random_first_duals_are_forgotten_after_a_clients_first_round():
    """u_i = D, whatever it was, and z_i = x + 2 D - u_i: only the first upload has it."""
    problem = some(3)
    random = liadmm(0.2, local="training", average="sampled", first_dual=2.0)
    ((state, _),) = follow(compose(plain(3, 0.2), random), problem, 1)
    moved = -0.2 * problem.slopes(problem.start)
    u, z = (torch.stack([state.clients.rows[k][n]["w"] for k in range(3)]) for n in ("dual", "z"))
    close(u, moved, 1e-9)
    drawn = (problem.start + 2 * moved - z) / problem.start.square().mean().sqrt()
    assert len(set(drawn.flatten().tolist())) == 9, "each client has its own"
    assert 1 < float(drawn.std()) < 4


def test_buffers_go_by_examples():
    federation = noisy_images([12, 20, 8])
    base = Algorithm(Uniformly(2), Epochs(1, 1000), solve=Sgd(0.1))
    one = train(base, rounds=1, federation=federation, module=small_cnn("batch"))
    two = train(
        compose(base, liadmm(0.1)), rounds=1, federation=federation, module=small_cnn("batch")
    )
    close(two.buffers["1.running_mean"], one.buffers["1.running_mean"])


def test_what_cannot_work_is_refused():
    base = plain(2, 0.1)
    with pytest.raises(ValueError, match="it needs local"):
        compose(base, liadmm(dual="step"))
    with pytest.raises(ValueError, match="sampled"):
        compose(base, liadmm(local="training", upload="before"))
    with pytest.raises(ValueError, match="first_dual"):
        compose(base, liadmm(first_dual=1.0))
    with pytest.raises(ValueError, match="gamma is 0"):
        compose(base, liadmm(gamma=0.0))
    with pytest.raises(ValueError, match="k0"):
        compose(base, celiadmm(k0=0))
    with pytest.raises(ValueError, match="fedvc"):
        compose(plain(2, 0.1, batch_size=8), fedvc(size=8), liadmm())
