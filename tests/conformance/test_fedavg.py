"""FedAvg, by its own mathematics; and the λ rule."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Epochs, Sgd, Uniformly
from fedlens.algorithms import fedavg, lambda_sum
from fedlens.core import keys
from fedlens.core.federation import Examples, Fixed, Holdings
from fedlens.rounds.cohorts import CLIENT, DRAW, SELECT
from tests.conformance.quadratics import (
    DOUBLE,
    Quadratics,
    close,
    end,
    follow,
    local_steps,
    path,
    plain,
    some,
)
from tests.federations import RAGGED, assert_equal, noisy_images, small_cnn, train

BASE = Algorithm(select=Uniformly(4), draw=Epochs(2, batch_size=8), solve=Sgd(0.1, momentum=0.5))


def batches(federation, draw, seed, round):
    """The batches that client 0 sees in a round."""
    key = keys.fold(keys.root(seed), CLIENT, round, torch.tensor([0]), torch.tensor([0]))
    plan = draw(federation.holdings(round, torch.tensor([0])), keys.fold(key, DRAW))
    for index, count in zip(plan.index[0], plan.counts[0].tolist(), strict=True):
        yield index[:count]


def select_key(seed, round):
    return keys.fold(keys.root(seed), SELECT, round)


def coloured_cnn():
    torch.default_generator.manual_seed(0)
    conv = nn.Conv2d(2, 6, 3, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(384, 4))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_is_centralised_sgd_bit_for_bit(momentum):
    """In single precision, on images that lie channels last in memory, as Fedlens has them."""
    federation = noisy_images([50])
    labels = federation.examples.labels
    images = federation.examples.images.float().expand(-1, 2, -1, -1)
    images = images.contiguous(memory_format=torch.channels_last)
    federation = replace(federation, examples=Examples(images, labels))
    draw = Epochs(2, batch_size=8)
    algorithm = Algorithm(Uniformly(1), draw, solve=Sgd(0.05, momentum, 1e-3), reset=False)
    state = train(algorithm, "sequential", 3, federation, coloured_cnn(), 7, torch.float32)

    module = coloured_cnn()
    optimiser = torch.optim.SGD(module.parameters(), 0.05, momentum, weight_decay=1e-3)
    for round in range(3):
        for index in batches(federation, draw, 7, round):
            optimiser.zero_grad()
            F.cross_entropy(module(images[index]), labels[index]).backward()
            optimiser.step()
    assert_equal(found=state.params, expected=dict(module.named_parameters()))


def test_a_client_that_starts_afresh_has_no_momentum_left():
    federation = noisy_images([24])
    kept = Algorithm(Uniformly(1), Epochs(1, 8), solve=Sgd(0.1, 0.9), reset=False)
    afresh = replace(kept, reset=True)
    one, two = (train(a, rounds=1, federation=federation) for a in (kept, afresh))
    assert_equal(found=one.params, expected=two.params)
    one, two = (train(a, rounds=2, federation=federation) for a in (kept, afresh))
    assert not torch.equal(one.params["0.weight"], two.params["0.weight"])


def test_full_batches_and_one_epoch_are_one_step_on_everybodys_loss():
    federation = noisy_images(RAGGED)
    algorithm = Algorithm(Uniformly(len(RAGGED)), Epochs(1, 1000), solve=Sgd(0.2))
    state = train(algorithm, rounds=1, federation=federation)
    module = small_cnn().double()
    logits = module(federation.examples.images)
    loss = F.cross_entropy(logits, federation.examples.labels)
    for name, p in module.named_parameters():
        (slope,) = torch.autograd.grad(loss, p, retain_graph=True)
        close(state.params[name], p.detach() - 0.2 * slope)


def test_the_mean_is_weighted_by_examples():
    problem = some(5)
    expected = (problem.shares * local_steps(problem, problem.start, 0.1, 3)).sum(0)
    close(end(plain(5, 0.1, epochs=3), problem), expected)
    wrong = local_steps(problem, problem.start, 0.1, 3).mean(0)
    assert (wrong - expected).norm() > 1e-3


def test_over_the_population_the_others_hold_the_model_where_it_was():
    problem = some(8)
    algorithm = compose(plain(3, 0.1, epochs=2), fedavg(over="population"))
    x = problem.start
    for state, _ in follow(algorithm, problem, 4):
        drawn = Uniformly(3)(problem.federation, 0, select_key(0, state.round - 1))
        moved = local_steps(problem, x, 0.1, 2) - x
        x = x + (problem.shares * moved)[drawn].sum(0)
        close(state.params["w"], x)


def test_over_the_population_is_over_the_cohort_when_everyone_takes_part():
    everyone = replace(BASE, select=Uniformly(10))
    one, two = (train(a) for a in (everyone, compose(everyone, fedavg(over="population"))))
    assert_equal(found=two.params, expected=one.params)


def test_identical_clients_average_to_any_one_of_them():
    one = noisy_images([24])
    index = torch.arange(24)
    many = replace(one, split=Fixed(Holdings.of([index, index, index])))
    algorithm = Algorithm(Uniformly(1), Epochs(3, batch_size=1000), solve=Sgd(0.1))
    alone = train(algorithm, rounds=2, federation=one)
    together = train(replace(algorithm, select=Uniformly(3)), rounds=2, federation=many)
    for name, p in alone.params.items():
        close(together.params[name], p)


def test_a_learning_rate_of_zero_changes_nothing():
    state = train(replace(BASE, solve=Sgd(0.0)), module=small_cnn())
    assert_equal(found=state.params, expected={n: p.double() for n, p in _params(small_cnn())})


def _params(module):
    return [(name, p.detach()) for name, p in module.named_parameters()]


def test_a_server_that_does_not_move_stays():
    state = train(replace(BASE, advance=Sgd(0.0)))
    assert_equal(found=state.params, expected={n: p.double() for n, p in _params(small_cnn())})


@pytest.mark.parametrize("epochs", [1, 4])
def test_moving_and_scaling_space_moves_and_scales_the_model(epochs):
    """w -> s w + b for minima and start alike, with curvatures as they were."""
    problem = some(5)
    s, b = 2.5, torch.tensor([1.0, -2.0, 3.0], dtype=DOUBLE)
    elsewhere = Quadratics(problem.a, s * problem.c + b, problem.sizes, s * problem.start + b)
    algorithm = plain(3, 0.2, epochs)
    close(path(algorithm, elsewhere, 4), s * path(algorithm, problem, 4) + b)


def test_buffers_are_averaged_with_the_same_weights_and_counters_take_the_maximum():
    federation = noisy_images([6, 20, 14])
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 4))
    algorithm = Algorithm(Uniformly(3), Epochs(2, batch_size=10), solve=Sgd(0.0))
    state = train(algorithm, rounds=1, federation=federation, module=module)
    assert int(state.buffers["1.num_batches_tracked"]) == 4  # of the client of 20: 2 x 2

    algorithm = replace(algorithm, draw=Epochs(1, batch_size=1000))
    state = train(algorithm, rounds=1, federation=federation, module=module)
    means, spreads = [], []
    for images in federation.examples.images.flatten(1).split([6, 20, 14]):
        means.append(0.1 * images.mean(0))
        spreads.append(0.9 + 0.1 * images.var(0, correction=1))
    shares = torch.tensor([6, 20, 14], dtype=DOUBLE)[:, None] / 40
    close(state.buffers["1.running_mean"], (shares * torch.stack(means)).sum(0))
    close(state.buffers["1.running_var"], (shares * torch.stack(spreads)).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_lambda_of_one_over_the_cohort_is_fedavg_byte_for_byte_for_equal_sizes(dtype):
    federation, module = noisy_images([16] * 6), small_cnn("batch")
    one = train(BASE, rounds=3, federation=federation, module=module, dtype=dtype)
    rule = compose(BASE, lambda_sum(1 / 4))
    two = train(rule, rounds=3, federation=federation, module=module, dtype=dtype)
    assert_equal(found=two.params, expected=one.params)
    assert_equal(found=two.buffers, expected=one.buffers)


def test_lambda_counts_every_client_alike_whatever_it_holds():
    problem = some(4)
    moved = local_steps(problem, problem.start, 0.1, 2) - problem.start
    algorithm = compose(plain(4, 0.1, epochs=2), lambda_sum(0.1))
    close(end(algorithm, problem), problem.start + 0.1 * moved.sum(0))


def test_lambda_of_a_tenth_moves_one_client_a_tenth_of_the_way():
    """Why the "centralised" curve of the report built on this rule looks slow."""
    problem = some(1)
    moved = local_steps(problem, problem.start, 0.1, 5)[0] - problem.start
    algorithm = compose(plain(1, 0.1, epochs=5), lambda_sum())
    close(end(algorithm, problem), problem.start + 0.1 * moved)


def test_every_round_has_its_own_cohort_of_distinct_clients():
    federation = noisy_images([2] * 20)
    drawn = [Uniformly(5)(federation, r, select_key(3, r)).tolist() for r in range(200)]
    assert all(len(set(cohort)) == 5 for cohort in drawn)
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=20)
    assert counts.min() > 25 and counts.max() < 80  # 50 each, +- 4 standard deviations
