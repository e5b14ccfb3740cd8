"""FedProx, by its own mathematics, and against the ways in which others got it wrong."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import BySize, Epochs, Sgd, Uniformly
from fedlens.algorithm.pieces.anneal import annealed, cosine
from fedlens.algorithms import fedprox
from fedlens.algorithms.fedprox import Proximal
from fedlens.core import Facts, Local, keys, squared_distance
from tests.conformance.quadratics import (
    DOUBLE,
    Quadratics,
    close,
    end,
    follow,
    path,
    plain,
    rounds_of,
    some,
)
from tests.federations import FEW, RAGGED, assert_equal, noisy_images, small_cnn, train

BASE = Algorithm(select=Uniformly(4), draw=Epochs(2, batch_size=8), solve=Sgd(0.1, momentum=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_mu_of_zero_is_fedavg_byte_for_byte(dtype):
    one, two = (train(a, rounds=3, dtype=dtype) for a in (BASE, compose(BASE, fedprox(0.0))))
    assert_equal(found=two.params, expected=one.params)


@pytest.mark.parametrize("mu", [0.1, 1.0, 5.0])
def test_a_solved_quadratic_is_the_closed_form(mu):
    problem = some(1)
    (a,), (c,), x = problem.a, problem.c, problem.start
    found = end(compose(plain(1, 0.25, epochs=160), fedprox(mu)), problem)
    close(found, (a * c + mu * x) / (a + mu), 1e-10)


def test_many_clients_average_their_closed_forms():
    problem, mu = some(5), 0.7
    found = end(compose(plain(5, 0.2, epochs=150), fedprox(mu)), problem)
    solved = (problem.a * problem.c + mu * problem.start) / (problem.a + mu)
    close(found, (problem.shares * solved).sum(0), 1e-10)


def test_the_larger_mu_the_less_a_client_moves():
    problem = some(4)
    moves = [
        float(
            (end(compose(plain(4, 0.02, epochs=20), fedprox(mu)), problem) - problem.start).norm()
        )
        for mu in (0.0, 0.01, 0.1, 1.0, 10.0, 90.0)
    ]
    assert moves == sorted(moves, reverse=True)
    assert moves[-1] < 0.1 * moves[0]


def test_solved_with_a_huge_mu_nothing_moves():
    problem = some(3)
    found = end(compose(plain(3, 5e-6, epochs=30), fedprox(1e5)), problem)
    assert (found - problem.start).norm() < 1e-3


def test_the_first_local_step_is_fedavgs():
    federation = noisy_images([16] * 4)
    one_step = Algorithm(Uniformly(4), Epochs(1, batch_size=16), solve=Sgd(0.1))
    one, two = (
        train(a, rounds=1, federation=federation) for a in (one_step, compose(one_step, fedprox(9)))
    )
    assert_equal(found=two.params, expected=one.params)
    two_steps = replace(one_step, draw=Epochs(2, batch_size=16))
    one, two = (
        train(a, rounds=1, federation=federation)
        for a in (two_steps, compose(two_steps, fedprox(9)))
    )
    assert not torch.equal(one.params["0.weight"], two.params["0.weight"])


def test_the_second_step_of_the_first_epoch_is_held_already():
    """Some code adds its term only from the second epoch on."""
    one = torch.ones(1, 1, dtype=DOUBLE)
    problem = Quadratics(one, 3 * one, torch.tensor([2]), torch.zeros(1, dtype=DOUBLE))
    found = end(compose(plain(1, 0.1, batch_size=1), fedprox(0.5)), problem)
    first = 0.1 * 3
    close(found, torch.tensor([first + 0.1 * (3 - first) - 0.1 * 0.5 * first], dtype=DOUBLE))


@pytest.mark.parametrize("mu", [0.5, 3.0])
def test_no_client_moves_further_than_its_gradient_over_mu(mu):
    """Solved, mu (w - x) is minus the gradient at w, which is the smaller one."""
    problem = some(1)
    moved = end(compose(plain(1, 0.3, epochs=60), fedprox(mu)), problem) - problem.start
    assert moved.norm() < problem.slope(problem.start).norm() / mu


def a_local(params):
    nothing = torch.zeros(2)
    anchor = {name: torch.ones_like(p[:1]) for name, p in params.items()}
    return Local(params, {}, anchor, {}, {}, Facts(nothing, nothing), {}, {}, nothing)


def test_the_proximal_term_passes_a_gradient_check():
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(2, 3, 2, generator=rng, dtype=DOUBLE, requires_grad=True)
    b = torch.randn(2, 3, generator=rng, dtype=DOUBLE, requires_grad=True)
    mu = torch.tensor([0.3, 2.0], dtype=DOUBLE)

    def term(w, b):
        return Proximal(mu)(a_local({"w": w, "b": b}))

    assert torch.autograd.gradcheck(term, (w, b))
    slope = torch.autograd.grad(term(w, b).sum(), w)[0]
    close(slope, mu.view(2, 1, 1) * (w.detach() - 1))
    assert float(term(torch.ones(2, 3, 2), torch.ones(2, 3)).abs().max()) == 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_mu_that_makes_sgd_diverge_is_refused(momentum):
    limit = 2 * (1 + momentum) / 0.1
    base = plain(2, 0.1, momentum=momentum)
    with pytest.raises(ValueError, match="diverges"):
        compose(base, fedprox(limit))
    compose(base, fedprox(0.999 * limit))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("part", "grows"), [(0.97, False), (1.03, True)])
def test_that_limit_is_the_true_one(momentum, part, grows):
    """On a curvature of almost nothing, SGD with the proximal term alone, from a first push."""
    limit = 2 * (1 + momentum) / 0.1
    one = torch.ones(1, 1, dtype=DOUBLE)
    problem = Quadratics(1e-6 * one, 1e6 * one, torch.tensor([1]), torch.zeros(1, dtype=DOUBLE))
    base = plain(1, 0.1, 400, momentum)
    algorithm = replace(base, objective=base.objective.plus(Proximal(part * limit)))
    assert (abs(float(end(algorithm, problem))) > 1.0) is grows


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="mu is -1"):
        compose(BASE, fedprox(-1.0))
    with pytest.raises(ValueError, match="uneven"):
        compose(BASE, fedprox(uneven=1.5))


@dataclass(frozen=True)
class Unsquared:
    """(mu / 2) ||w - w_server||, as some code has it."""

    mu: float

    def __call__(self, local):
        return self.mu / 2 * (squared_distance(local.params, local.anchor) + 1e-30).sqrt()


@dataclass(frozen=True)
class WrongSign:
    """A pull away from the server's model, as some code has it."""

    mu: float

    def __call__(self, local):
        return -self.mu / 2 * squared_distance(local.params, local.anchor)


@dataclass(frozen=True)
class NoGradient:
    """A term computed outside the graph, as some code has it."""

    mu: float

    def __call__(self, local):
        return self.mu / 2 * squared_distance(local.params, local.anchor).detach()


@pytest.mark.parametrize("mistake", [Unsquared, WrongSign, NoGradient])
def test_the_published_mistakes_miss_the_closed_form(mistake):
    problem, mu = some(1), 0.4
    (a,), (c,), x = problem.a, problem.c, problem.start
    right = (a * c + mu * x) / (a + mu)
    base = plain(1, 0.4, epochs=120)
    close(end(compose(base, fedprox(mu)), problem), right, 1e-10)
    wrong = end(replace(base, objective=base.objective.plus(mistake(mu))), problem)
    assert (wrong - right).norm() > 0.05
    if mistake is NoGradient:
        close(wrong, c, 1e-10)
    if mistake is WrongSign:
        close(wrong, (a * c - mu * x) / (a - mu), 1e-5)


def test_by_size_draws_clients_in_proportion_and_takes_the_plain_mean():
    federation = noisy_images(RAGGED)
    algorithm = compose(replace(BASE, select=Uniformly(5)), fedprox(0.1, sampling="by-size"))
    assert algorithm.select == BySize(5)
    drawn = [
        algorithm.select(federation, r, keys.fold(keys.root(0), r)).tolist() for r in range(2000)
    ]
    found = torch.bincount(torch.tensor(drawn).flatten(), minlength=10) / 10_000
    expected = torch.tensor(RAGGED) / sum(RAGGED)
    spread = (expected * (1 - expected) / 10_000).sqrt()
    assert ((found - expected).abs() < 4 * spread).all()


def test_by_size_and_uniform_agree_for_equal_sizes_up_to_who_is_drawn():
    problem = some(1, equal=True)
    three = Quadratics(
        problem.a.expand(3, -1), problem.c.expand(3, -1), torch.full((3,), 4), problem.start
    )
    one, two = (
        end(compose(plain(2, 0.1, 3), fedprox(0.5, sampling=s)), three, 3)
        for s in ("uniform", "by-size")
    )
    close(one, two)


def test_inexactness_is_one_when_nothing_moves_and_zero_when_solved():
    problem = some(4)

    def inexactness(lr, epochs):
        algorithm = compose(plain(4, lr, epochs), fedprox(0.3, inexactness=True))
        ((_, outcome),) = follow(algorithm, problem, 1)
        return float(outcome.scalars["inexactness"])

    assert inexactness(0.0, 3) == pytest.approx(1, abs=1e-12)
    assert inexactness(0.4, 60) < 1e-9
    assert 0 < inexactness(0.2, 8) < inexactness(0.2, 2) < 1


def test_inexactness_is_the_ratio_of_the_gradients_of_h():
    """One client, n steps: w - w* shrinks by (1 - lr (a + mu))^n, and so does the gradient."""
    problem, mu, lr, epochs = some(1), 0.3, 0.1, 4
    algorithm = compose(plain(1, lr, epochs, batch_size=1), fedprox(mu, inexactness=True))
    ((state, outcome),) = follow(algorithm, problem, 1)
    (a,), (c,), x = problem.a, problem.c, problem.start
    steps = epochs * int(problem.sizes[0])
    solved = (a * c + mu * x) / (a + mu)
    w = solved + (1 - lr * (a + mu)) ** steps * (x - solved)
    close(state.params["w"], w)
    ratio = (a * (w - c) + mu * (w - x)).norm() / (a * (x - c)).norm()
    assert float(outcome.scalars["inexactness"]) == pytest.approx(float(ratio), rel=1e-10)


def test_an_annealed_learning_rate_falls_in_the_same_steps_when_inexactness_is_recorded():
    problem, base = some(4), plain(4, 0.3, epochs=4, batch_size=2)
    base = replace(base, solve=annealed(base.solve, cosine(end=0.1)))
    expected = path(compose(base, fedprox(0.3)), problem, 3)
    close(path(compose(base, fedprox(0.3, inexactness=True)), problem, 3), expected)


def test_a_share_of_clients_works_less():
    holdings = noisy_images([16] * 400).everyone(0)
    client_keys = keys.fold(keys.root(0), torch.arange(400))
    even, uneven = (Epochs(5, 8, u)(holdings, client_keys) for u in (0.0, 0.4))
    assert (even.steps == 10).all()
    slow = uneven.steps < 10
    assert 0.3 < float(slow.double().mean()) < 0.5
    assert set(uneven.steps[slow].tolist()) == {2, 4, 6, 8}  # whole passes, at least one
    done = uneven.counts > 0
    assert torch.equal(uneven.index[done], even.index[done]), "it is done as by the others"


def test_uneven_work_counts_what_was_done():
    algorithm = compose(plain(6, 0.1, epochs=4), fedprox(0.2, uneven=1.0))
    problem = some(6)
    steps = algorithm.draw(
        problem.federation.everyone(0),
        keys.fold(
            keys.fold(keys.root(0), keys.purpose("client"), 0, torch.arange(6), torch.zeros(6)),
            keys.purpose("draw"),
        ),
    ).steps[:, None]
    assert steps.max() < 4 and steps.min() >= 1 and len(steps.unique()) > 1
    solved = (problem.a * problem.c + 0.2 * problem.start) / (problem.a + 0.2)
    w = solved + (1 - 0.1 * (problem.a + 0.2)) ** steps * (problem.start - solved)
    close(end(algorithm, problem), (problem.shares * w).sum(0))


def test_inexactness_is_recorded_for_a_net():
    algorithm = compose(BASE, fedprox(0.1, inexactness=True))
    for _, outcome in rounds_of(algorithm, noisy_images(FEW), small_cnn(), 2):
        assert 0 < float(outcome.scalars["inexactness"]) < 2
