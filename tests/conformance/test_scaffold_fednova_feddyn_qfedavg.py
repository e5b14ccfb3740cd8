"""SCAFFOLD, FedNova, FedDyn, q-FedAvg and FedBN, by their own mathematics."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Equally, Sgd, Uniformly
from fedlens.algorithms import fedbn, feddyn, fednova, fedprox, qfedavg, scaffold
from fedlens.algorithms.fednova import BySteps
from fedlens.algorithms.scaffold import TellControl
from fedlens.core import Cohort, Local, Upload
from tests.conformance.quadratics import (
    DOUBLE,
    Quadratics,
    close,
    end,
    error,
    follow,
    local_steps,
    path,
    plain,
    rounds_of,
    some,
)
from tests.federations import RAGGED, assert_equal, noisy_images, small_cnn, train


def scaffold_in_numpy(
    problem, lr, steps, rounds, own=None, server=None, divisor=None, momentum=0.0
):
    """Algorithm 1, option II, with all clients in every round."""
    x = problem.start.numpy().copy()
    a, c = problem.a.numpy(), problem.c.numpy()
    number = len(problem)
    own = np.zeros_like(a) if own is None else own
    server = own.mean(0) if server is None else server
    rows = []
    for _ in range(rounds):
        y, v = np.repeat(x[None], number, 0), 0.0
        for _ in range(steps):
            v = momentum * v + a * (y - c)
            y = y - lr * (v - own + server)
        new = own - server + (x - y) / ((divisor or steps) * lr)
        x = x + (y - x).mean(0)
        server = server + (new - own).sum(0) / number
        own = new
        rows.append(x)
    return torch.tensor(np.array(rows))


def test_scaffold_is_the_papers_algorithm():
    problem = some(4)
    found = path(compose(plain(4, 0.1, epochs=5), scaffold()), problem, 12)
    close(found, scaffold_in_numpy(problem, 0.1, 5, 12), 1e-11)


def test_controls_start_at_zero_so_that_round_one_is_fedavg_with_equal_weights():
    problem = some(4)
    state = next(follow(compose(plain(4, 0.1, 3), scaffold()), problem, 1))[0]
    close(state.params["w"], local_steps(problem, problem.start, 0.1, 3).mean(0))
    params = {"w": problem.start}
    assert float(TellControl().init(params, problem.federation)["control"]["w"].abs().max()) == 0


def test_controls_that_do_not_start_at_zero_end_elsewhere():
    """As in public code that starts the clients' controls at random weights, the server's at 0."""
    problem = some(4)
    noise = np.random.default_rng(0).normal(size=(4, 3))
    wrong = scaffold_in_numpy(problem, 0.1, 5, 60, own=noise, server=np.zeros(3))[-1]
    found = end(compose(plain(4, 0.1, epochs=5), scaffold()), problem, 60)
    assert error(found, problem.equal_optimum) < 1e-6
    assert (wrong - problem.equal_optimum).norm() > 0.05


def test_a_wrong_number_of_steps_in_the_controls_shows():
    """As in public code that divides by something else than the steps taken."""
    problem = some(4)
    found = path(compose(plain(4, 0.1, epochs=5), scaffold()), problem, 6)
    wrong = scaffold_in_numpy(problem, 0.1, 5, 6, divisor=1)
    assert (found[1:] - wrong[1:]).norm() > 0.05


def test_one_full_step_with_everyone_is_gradient_descent():
    problem = some(5, equal=True)
    x = problem.start
    for state, _ in follow(compose(plain(5, 0.2), scaffold()), problem, 10):
        x = x - 0.2 * problem.slope(x)
        close(state.params["w"], x)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [6, 2])
def test_scaffold_reaches_the_optimum_where_fedavg_does_not(clients):
    problem = some(6, equal=True)
    rounds = 40 if clients == 6 else 150
    found = end(compose(plain(clients, 0.15, epochs=4), scaffold()), problem, rounds)
    assert error(found, problem.optimum) < 1e-5
    assert error(end(plain(6, 0.15, epochs=4), problem, 40), problem.optimum) > 1e-2


@pytest.mark.parametrize("clients", [5, 2])
def test_the_servers_control_is_the_mean_of_all_clients(clients):
    """Those never seen have a control of zero. Steps differ: sizes 1 to 5 in batches of 2."""
    problem = some(5)
    algorithm = compose(plain(clients, 0.1, 2, batch_size=2), scaffold())
    for state, _ in follow(algorithm, problem, 6):
        own = [row["control"]["w"] for row in state.clients.rows.values()]
        close(state.told["control"]["w"], torch.stack(own).sum(0) / 5)


def test_a_control_comes_to_be_the_clients_gradient():
    problem = some(4)
    *_, (state, _) = follow(compose(plain(4, 0.1, epochs=5), scaffold()), problem, 60)
    own = torch.stack([state.clients.rows[k]["control"]["w"] for k in range(4)])
    close(own, problem.slopes(problem.equal_optimum), 1e-5)


def test_a_client_without_examples_has_a_control_of_zero():
    """Else it would take the server's off in every round, until nobody is corrected by it."""
    problem = replace(some(4, equal=True), sizes=torch.tensor([2, 2, 0, 2]))
    *_, (state, _) = follow(compose(plain(4, 0.1, epochs=5), scaffold()), problem, 150)
    assert not state.clients.rows[2]["control"]["w"].any()
    assert error(state.params["w"], problem.optimum) < 1e-5


def test_with_momentum_scaffold_is_what_public_benchmarks_run():
    """Momentum is of the gradients alone, so controls settle; but beside the optimum, since it
    starts from rest in every round."""
    problem = some(4, equal=True)
    algorithm = compose(plain(4, 0.02, epochs=10, momentum=0.9), scaffold())
    found = path(algorithm, problem, 40)
    close(found, scaffold_in_numpy(problem, 0.02, 10, 40, momentum=0.9), 1e-11)
    assert error(found[-1], found[-2]) < 1e-3
    assert 0.05 < error(found[-1], problem.optimum) < 0.2


def test_with_momentum_that_is_kept_scaffold_reaches_the_optimum():
    problem = some(4, equal=True)
    algorithm = compose(plain(4, 0.02, epochs=10, momentum=0.9), scaffold())
    assert error(end(replace(algorithm, reset=False), problem, 150), problem.optimum) < 1e-5


@pytest.mark.parametrize("clients", [5, 2])
def test_the_servers_control_weighs_clients_as_their_updates_are_weighed(clients):
    problem = some(5)
    base = plain(clients, 0.05, 2, batch_size=2)
    for state, _ in follow(compose(base, scaffold(weigh="examples")), problem, 6):
        own = {k: row["control"]["w"] for k, row in state.clients.rows.items()}
        total = sum(problem.sizes[k] * control for k, control in own.items())
        close(state.told["control"]["w"], total / problem.sizes.sum())
    if clients == 5:
        found = end(compose(base, scaffold(weigh="examples")), problem, 150)
        assert error(found, problem.optimum) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "momentum"), [(0.2, 0.0), (0.06, 0.9)])
def test_a_client_of_many_steps_throws_equal_weights_off_but_not_weights_by_examples(lr, momentum):
    """It takes 60 steps, the others one; its own loss is flat. Momentum is not what diverges."""
    sizes = torch.tensor([1, 1, 1, 1, 60])
    a = torch.where(sizes > 1, 0.01, 1.0).double()[:, None]
    problem = Quadratics(
        a, torch.arange(5.0, dtype=DOUBLE)[:, None], sizes, torch.zeros(1).double()
    )
    base = replace(plain(5, lr, 1, momentum, batch_size=1), reset=momentum == 0)
    assert error(end(compose(base, scaffold()), problem, 45), problem.equal_optimum) > 100
    found = end(compose(base, scaffold(weigh="examples")), problem, 45)
    assert error(found, problem.optimum) < 0.05


def cohort_of(sizes, steps):
    sizes = torch.tensor(sizes)
    shares = sizes.double() / sizes.sum()
    number = len(sizes)
    return Cohort(
        torch.arange(number), sizes, torch.tensor(steps), shares, None, number, int(sizes.sum())
    )


def test_equal_steps_make_fednova_fedavg():
    federation = noisy_images([16] * 8)
    base = Algorithm(Uniformly(4), Epochs(2, 8), solve=Sgd(0.1, 0.5))
    one, two = (train(a, federation=federation) for a in (base, compose(base, fednova())))
    for name, p in one.params.items():
        close(two.params[name], p)


@pytest.mark.parametrize("momentum", [0.3, 0.9])
def test_the_weight_of_steps_with_momentum_is_that_of_unrolled_velocities(momentum):
    """|a| is how far a constant unit gradient takes a client, in learning rates."""
    unrolled = []
    for steps in (1, 2, 7, 30):
        v = moved = 0.0
        for _ in range(steps):
            v = momentum * v + 1
            moved += v
        unrolled.append(moved)
    weight = torch.tensor(unrolled, dtype=DOUBLE)
    cohort = cohort_of([5, 1, 2, 8], [1, 2, 7, 30])
    share = cohort.size_shares
    close(BySteps(momentum)(cohort), (share * weight).sum() * share / weight, 1e-10)
    close(BySteps(0.0)(cohort), (share * cohort.steps).sum() * share / cohort.steps)


def test_fednova_minimises_what_was_asked_for_where_fedavg_does_not():
    """Sizes 1 to 5 in batches of one, so steps differ; to first order in the learning rate."""
    problem, lr = some(4), 1e-4
    base = plain(4, lr, batch_size=1)

    def moved(algorithm, x):
        there = Quadratics(problem.a, problem.c, problem.sizes, x)
        return float((end(algorithm, there) - x).norm()) / lr

    squared = (problem.sizes.double() ** 2)[:, None] * problem.a
    other = (squared * problem.c).sum(0) / squared.sum(0)  # steps count as weights once more
    nova = compose(base, fednova())
    assert moved(nova, problem.optimum) < 0.005 < 1 < moved(base, problem.optimum)
    assert moved(base, other) < 0.005 < 1 < moved(nova, other)


def test_fednova_is_the_papers_formula():
    problem, lr = some(4), 0.05
    tau, p = 2 * problem.sizes[:, None], problem.shares
    x = problem.start
    for state, _ in follow(compose(plain(4, lr, 2, batch_size=1), fednova()), problem, 6):
        per_step = (local_steps(problem, x, lr, tau) - x) / tau
        x = x + (p * tau).sum() * (p * per_step).sum(0)
        close(state.params["w"], x)


@pytest.mark.parametrize("in_turn", [1, -1])
def test_fednova_with_fedprox_is_the_papers_formula(in_turn):
    """a = ((1 - lr mu)^(tau - 1), ..., 1 - lr mu, 1)."""
    problem, lr, mu = some(4), 0.05, 3.0
    tau, p = 2 * problem.sizes[:, None], problem.shares
    kept = [(1 - lr * mu) ** torch.arange(t, dtype=DOUBLE) for t in tau[:, 0].tolist()]
    a = torch.stack([row.sum() for row in kept])[:, None]
    papers = (fednova(), fedprox(mu))[::in_turn]
    x = problem.start
    for state, _ in follow(compose(plain(4, lr, 2, batch_size=1), *papers), problem, 6):
        solved = (problem.a * problem.c + mu * x) / (problem.a + mu)
        moved = (1 - (1 - lr * (problem.a + mu)) ** tau) * (solved - x)
        x = x + (p * a).sum() * (p * moved / a).sum(0)
        close(state.params["w"], x)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fednova_with_fedprox_minimises_what_was_asked_for(momentum):
    """To first order in lr, at any lr mu; the weights of SGD alone do not."""
    problem, lr, mu = some(4), 1e-4, 2000.0
    there = replace(problem, start=problem.optimum)
    right = compose(plain(4, lr, 3, momentum, batch_size=1), fedprox(mu), fednova())

    def moved(weigh):
        return float((end(replace(right, weigh=weigh), there) - there.start).norm()) / lr

    assert moved(right.weigh) < 0.02 < 1 < moved(BySteps(momentum))


def test_fednova_refuses_momentum_that_is_kept():
    """From rest, 20 steps lead further than ten times 2; with the momentum of before, just so.

    So its weights would be wrong from the second round on, and with them the optimum.
    """
    kept = replace(plain(2, momentum=0.9), reset=False)
    for papers in ((fednova(),), (fednova(), fedprox(0.1)), (fedprox(0.1), fednova())):
        with pytest.raises(ValueError, match="reset"):
            compose(kept, *papers)
    compose(replace(plain(2), reset=False), fednova())  # there is none to keep


def test_fednova_refuses_what_it_has_no_steps_for():
    with pytest.raises(ValueError, match="choose a number from 0 to below 1"):
        compose(plain(2, momentum=1.0), fednova())
    with pytest.raises(ValueError, match="mu"):
        compose(plain(2, 0.1), fednova(), fedprox(10.0))
    papers = (fedprox(inexactness=True), fednova())
    for pair in (papers, papers[::-1]):
        with pytest.raises(ValueError, match="rules"):
            compose(plain(2), *pair)


def test_feddyn_is_the_papers_algorithm():
    """With few clients a round, each solving f - <h, w> + alpha / 2 |w - x|^2."""
    problem, alpha = some(5), 0.8
    algorithm = compose(plain(2, 0.35, epochs=60), feddyn(alpha))
    x, own, server = problem.start, torch.zeros_like(problem.a), torch.zeros(3, dtype=DOUBLE)
    seen: dict[int, torch.Tensor] = {}
    for state, _ in follow(algorithm, problem, 6):
        now = {k: row["gradient"]["w"] for k, row in state.clients.rows.items()}
        cohort = [k for k, h in now.items() if k not in seen or not torch.equal(h, seen[k])]
        assert len(cohort) == 2
        seen = now
        w = (problem.a * problem.c + own + alpha * x) / (problem.a + alpha)
        for k in cohort:
            own[k] = own[k] - alpha * (w[k] - x)
            close(now[k], own[k], 1e-8)
            close(own[k], problem.a[k] * (w[k] - problem.c[k]), 1e-8)  # the gradient at w_k
        server = server - alpha / 5 * sum(w[k] - x for k in cohort)
        x = sum(w[k] for k in cohort) / 2 - server / alpha
        close(state.params["w"], x, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [5, 2])
def test_feddyns_fixed_point_is_the_optimum_of_the_plain_mean(clients):
    problem = some(5)
    algorithm = compose(plain(clients, 0.4, epochs=4), feddyn(1.0))
    found = end(algorithm, problem, 60 if clients == 5 else 200)
    assert error(found, problem.equal_optimum) < 1e-6


def test_feddyns_server_correction_is_the_mean_of_all_clients_gradients():
    """h = (1 / m) sum h_k, since both move by - alpha (w_k - x) of those that take part."""
    problem = some(5)
    for state, _ in follow(compose(plain(2, 0.2, epochs=3), feddyn(0.5)), problem, 8):
        own = torch.stack([row["gradient"]["w"] for row in state.clients.rows.values()])
        close(state.server["h"]["w"][0], own.sum(0) / 5)


def test_feddyn_refuses_a_server_learning_rate_and_an_alpha_of_zero():
    with pytest.raises(ValueError, match=r"server\.lr"):
        compose(replace(plain(2), advance=Sgd(0.5)), feddyn())
    with pytest.raises(ValueError, match="alpha is 0"):
        compose(plain(2), feddyn(0.0))


def fair(problem, x, lr, steps, q):
    """Algorithm 2 of Li et al., in NumPy."""
    a, c, x = problem.a.numpy(), problem.c.numpy(), x.numpy()
    loss = 0.5 * (a * (x - c) ** 2).sum(1)
    w = local_steps(problem, torch.tensor(x), lr, steps).numpy()
    d = (x - w) / lr
    delta = loss[:, None] ** q * d
    h = q * loss ** (q - 1) * (d**2).sum(1) + loss**q / lr
    return torch.tensor(x - delta.sum(0) / h.sum()), loss


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 3.0])
def test_qfedavg_is_the_papers_algorithm(q):
    problem, x = some(4), some(4).start
    for state, _ in follow(compose(plain(4, 0.1, epochs=3), qfedavg(q)), problem, 5):
        x, _ = fair(problem, x, 0.1, 3, q)
        close(state.params["w"], x, 1e-10)


def test_q_of_zero_is_fedavg_with_equal_weights():
    problem = some(5)
    equal = replace(plain(3, 0.1, epochs=2), weigh=Equally())
    close(path(compose(equal, qfedavg(0.0)), problem, 4), path(equal, problem, 4))


@dataclass(frozen=True)
class SendLoss:
    """What `inner` sends, and the loss that was measured before the model moved."""

    inner: Callable[[Local], Upload]

    def __call__(self, local):
        return replace(self.inner(local), scalars={"F": local.solver["probed"]["loss"]})


def test_the_loss_of_a_client_is_that_of_the_servers_model_on_all_it_holds():
    """Over batches of unequal sizes, for one client."""
    federation = noisy_images([21])
    algorithm = compose(Algorithm(Uniformly(1), Epochs(2, 8), solve=Sgd(0.3)), qfedavg(1.0))
    algorithm = replace(algorithm, upload=SendLoss(algorithm.upload))
    ((_, outcome),) = rounds_of(algorithm, federation, small_cnn(), 1)
    with torch.no_grad():
        logits = small_cnn().double()(federation.examples.images)
    close(outcome.scalars["F"], F.cross_entropy(logits, federation.examples.labels))


@pytest.mark.slow
def test_the_larger_q_the_less_the_clients_losses_differ():
    problem = some(3)

    def spread(q):
        algorithm = compose(plain(3, 0.1), qfedavg(q))
        return float(fair(problem, end(algorithm, problem, 60), 0.1, 1, 1)[1].var())

    assert spread(0.0) > spread(1.0) > spread(5.0)


def test_fedbn_without_normalisation_is_fedavg_byte_for_byte():
    base = Algorithm(Uniformly(4), Epochs(2, 8), solve=Sgd(0.1, 0.5))
    one, two = (train(a, module=small_cnn("none")) for a in (base, compose(base, fedbn())))
    assert_equal(found=two.params, expected=one.params)


def test_under_fedbn_a_client_keeps_its_own_normalisation_and_only_that():
    base = compose(Algorithm(Uniformly(10), Epochs(1, 8), solve=Sgd(0.1)), fedbn())
    state = train(base, rounds=2, federation=noisy_images(RAGGED), module=small_cnn("batch"))
    names = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    own = [row["own"] for row in state.clients.rows.values()]
    assert all(set(norm) == names for norm in own)
    assert not torch.equal(own[0]["1.weight"], own[5]["1.weight"])
    # Two passes of a client of 30: eight batches, whatever the others did.
    assert int(state.clients.rows[4]["own"]["1.num_batches_tracked"]) == 8
