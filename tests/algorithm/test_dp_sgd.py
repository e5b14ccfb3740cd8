"""Steps that protect single examples: batches, noise, and what they reduce to."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.dp_sgd import check_protected, protect_examples
from fedlens.algorithm.pieces import (
    ByEffectiveNumber,
    Epochs,
    PerExample,
    PoissonBatches,
    Sgd,
    Steps,
    Uniformly,
)
from fedlens.algorithms.admm import fedadmm
from fedlens.algorithms.fedbuff import fedbuff
from fedlens.algorithms.fedir import fedir
from fedlens.algorithms.fedns import fedns
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.fedvc import fedvc
from fedlens.algorithms.liadmm import liadmm
from fedlens.core import Facts, Local, Plan, keys
from fedlens.core.federation import Holdings
from tests.federations import CPU, FEW, noisy_images, small_cnn, train

BASE = Algorithm(select=Uniformly(5), draw=Epochs(2, batch_size=4), solve=Sgd(0.1))


def drawn(sizes: list[int], batches: PoissonBatches, seed: int = 0) -> tuple[Holdings, Plan]:
    holdings = Holdings.of([*torch.arange(sum(sizes)).split(sizes)])
    return holdings, batches(holdings, keys.fold(keys.root(seed), torch.arange(len(sizes))))


def local(sizes: list[int], seed: int = 0) -> Local:
    facts = Facts(torch.tensor(sizes), torch.zeros(len(sizes), 1, dtype=torch.int64))
    empty: dict[str, Any] = {}
    client_keys = keys.fold(keys.root(seed), torch.arange(len(sizes)))
    return Local(
        *(empty,) * 5, facts, empty, empty, torch.ones(len(sizes)),
        step=torch.tensor(3), client_keys=client_keys,
    )  # fmt: skip


def test_each_example_is_in_a_batch_with_its_probability():
    size, batch_size, steps = 40, 8, 4000
    _, plan = drawn([size], PoissonBatches(batch_size, steps, "steps"))
    counts, rate = plan.counts[0].double(), batch_size / size
    spread = math.sqrt(rate * (1 - rate))
    # Within five standard deviations, for the size of batches and for each example.
    assert abs(counts.mean() - batch_size) < 5 * spread * math.sqrt(size / steps)
    assert counts.var() == pytest.approx(size * spread**2, rel=0.15)
    shown = plan.index[0][torch.arange(plan.index.shape[2]) < plan.counts[0][:, None]]
    often = torch.bincount(shown, minlength=size).double()
    assert (abs(often / steps - rate) < 5 * spread / math.sqrt(steps)).all()


def test_two_examples_are_drawn_independently():
    _, plan = drawn([2], PoissonBatches(1, 4000, "steps"))
    assert plan.taken is not None and plan.taken.tolist() == [4000]
    shares = np.bincount(plan.counts[0].numpy(), minlength=3) / 4000
    assert abs(shares - [0.25, 0.5, 0.25]).max() < 0.04


def test_no_batch_has_an_example_twice_or_another_clients():
    sizes = [3, 0, 1, 50]
    holdings, plan = drawn(sizes, PoissonBatches(5, 3))
    assert plan.steps.tolist() == [2, 0, 1, 30]
    for client in range(4):
        mine = set(holdings.index[slice(*holdings.offsets[client : client + 2].tolist())].tolist())
        for batch, count in zip(plan.index[client], plan.counts[client].tolist(), strict=True):
            assert len(set(batch[:count].tolist())) == count
            assert set(batch[:count].tolist()) <= mine
    assert (plan.counts[0, :2] == 3).all()  # a client with fewer shows all that it has


def test_a_batch_that_is_wider_than_expected_is_not_cut():
    batches = PoissonBatches(8, 3000, "steps")
    _, plan = drawn([1000], batches)
    assert int(plan.counts.max()) > batches.widest(1000)
    assert plan.index.shape[2] >= int(plan.counts.max())


def test_what_a_client_draws_does_not_depend_on_the_others():
    _, alone = drawn([30], PoissonBatches(5, 3))
    _, plan = drawn([30, 70], PoissonBatches(5, 3))
    for step, count in enumerate(alone.counts[0].tolist()):
        assert plan.counts[0, step] == count
        assert torch.equal(plan.index[0, step, :count], alone.index[0, step, :count])


def test_secret_batches_have_the_same_rates_and_no_key():
    one, other = (drawn([400], PoissonBatches(8, 50, "steps", secret=True))[1] for _ in range(2))
    assert not torch.equal(one.counts, other.counts)
    assert abs(one.counts.double().mean() - 8) < 5 * math.sqrt(8 / 50)


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_has_its_standard_deviation(secret, dtype):
    private = PerExample(clip=0.5, noise=3.0, batch_size=10, secret=secret)
    sums = {"a": torch.zeros(2, 100, 999, dtype=dtype), "b": torch.ones(2, 5, dtype=dtype)}
    found = private(sums, local([100, 4]))
    assert found["a"].dtype is dtype
    for row, expected in ((0, 10), (1, 4)):
        z = found["a"][row].double().flatten() * expected / 1.5
        assert abs(z.mean()) < 5 / math.sqrt(len(z))
        assert z.square().mean() == pytest.approx(1, abs=5 * math.sqrt(2 / len(z)))
        assert (z**4).mean() == pytest.approx(3, abs=5 * math.sqrt(96 / len(z)))
        assert z.abs().max() < 7
    assert not torch.equal(found["a"][0], found["a"][1] * 0.4)


def test_noise_by_key_is_the_same_again_and_other_noise_in_each_step():
    private, sums = PerExample(1.0, 1.0, 10), {"a": torch.zeros(2, 7)}
    first, again = (private(sums, local([20, 20]))["a"] for _ in range(2))
    assert torch.equal(first, again)
    later = private(sums, replace(local([20, 20]), step=torch.tensor(4)))["a"]
    assert not torch.equal(first, later)
    assert not torch.equal(first, private(sums, local([20, 20], seed=1))["a"])


def test_secret_noise_is_new_each_time_and_on_a_grid():
    private = PerExample(clip=0.3, noise=2.0, batch_size=1, secret=True)
    sums = {"a": torch.full((1, 5000), 0.1234567)}
    one, other = (private(sums, local([1]))["a"] for _ in range(2))
    assert (one != other).double().mean() > 0.99
    steps = one.double() / (0.5 * 2.0**-12)  # 0.6 rounded down to a power of two is 0.5
    assert torch.equal(steps, steps.round())


def test_without_noise_and_clip_and_with_whole_batches_it_is_gradient_descent():
    plain = train(replace(BASE, draw=Steps(1000, 3, 3, "steps")))
    whole = replace(BASE, draw=Steps(1000, 3, 3, "steps"))
    private = train(protect_examples(whole, clip=1e9, noise=0.0))
    for name, value in plain.params.items():
        torch.testing.assert_close(private.params[name], value, rtol=1e-12, atol=1e-14)


def test_penalties_are_added_after_the_noise():
    private = protect_examples(BASE, clip=0.5, noise=1.0)
    by_penalty = train(compose(replace(private, solve=Sgd(0.1, momentum=0.3)), fedprox(0.2)))
    contracted = train(compose(private, fedprox(0.2)))
    assert compose(private, fedprox(0.2)).local_step.contracts  # type: ignore[union-attr]

    class Alone(type(fedprox(0.2).amend(private).objective.penalties[0])):  # type: ignore[misc]
        pull = None

    autograd = replace(private, objective=private.objective.plus(Alone(0.2)))
    for name, value in contracted.params.items():
        torch.testing.assert_close(train(autograd).params[name], value, rtol=1e-9, atol=1e-11)
    assert by_penalty.params.keys() == contracted.params.keys()


def test_empty_clients_take_no_step_and_a_client_with_one_example_does():
    federation = noisy_images([0, 1, 5])
    algorithm = protect_examples(replace(BASE, select=Uniformly(3)), clip=0.5, noise=1.0)
    state = train(algorithm, federation=federation)
    assert all(p.isfinite().all() for p in state.params.values())
    alone = noisy_images([0])
    before = small_cnn().state_dict()
    after = train(replace(algorithm, select=Uniformly(1)), federation=alone).params
    for name, value in after.items():
        torch.testing.assert_close(value, before[name].double())


def test_an_empty_batch_is_a_step_with_noise_alone():
    class Empty(PoissonBatches):
        def rate(self, held: int) -> float:
            return 0.0

    algorithm = protect_examples(BASE, clip=1.0, noise=1.0)
    batches = Empty(4, 2)
    still = train(
        replace(
            algorithm,
            draw=batches,
            objective=replace(algorithm.objective, private=PerExample(1.0, 0.0, 4)),
        ),
        federation=noisy_images(FEW),
    )
    moved = train(replace(algorithm, draw=batches), federation=noisy_images(FEW))
    before = small_cnn().state_dict()
    for name, value in before.items():
        torch.testing.assert_close(still.params[name], value.double())
        assert not torch.equal(moved.params[name], value.double())


@pytest.mark.parametrize(
    ("papers", "said"),
    [([fedir((0.25,) * 4)], "weighs"), ([fedns()], "label_counts")],
    ids=["weights", "counts"],
)
def test_what_reads_more_of_the_data_is_refused(papers, said):
    algorithm = compose(protect_examples(BASE, 1.0, 1.0), *papers)
    with pytest.raises(ValueError, match=said):
        check_protected(algorithm)


def test_balanced_classes_are_refused():
    objective = BASE.objective.times(ByEffectiveNumber(0.9))
    with pytest.raises(ValueError, match="class_balance"):
        check_protected(protect_examples(replace(BASE, objective=objective), 1.0, 1.0))


@pytest.mark.parametrize("paper", [liadmm(), fedadmm(k0=2)])
def test_papers_with_batches_of_their_own_refuse_it(paper):
    with pytest.raises(ValueError, match="leave"):
        compose(protect_examples(BASE, 1.0, 1.0), paper)


def test_a_virtual_client_takes_its_steps_with_batches_by_chance():
    made = compose(protect_examples(BASE, 1.0, 1.0), fedvc(size=12))
    assert made.draw == PoissonBatches(4, 3, "steps")
    check_protected(made)


def test_asynchronous_rounds_are_refused():
    with pytest.raises(ValueError, match="asynchronous"):
        check_protected(compose(protect_examples(BASE, 1.0, 1.0), fedbuff()))


def test_label_counts_need_noise_and_noise_needs_label_counts():
    check_protected(compose(protect_examples(BASE, 1.0, 1.0, count_noise=5.0), fedns()))
    with pytest.raises(ValueError, match="count_noise"):
        check_protected(protect_examples(BASE, 1.0, 1.0, count_noise=5.0))


def test_noised_label_counts_are_the_same_in_every_round_and_whole_numbers_from_0():
    private = PerExample(1.0, 1.0, 4, count_noise=5.0)
    counts, own = torch.tensor([[3, 700], [40, 0]]).repeat(500, 1), torch.arange(1000)
    found = private.noisy_counts(counts, keys.fold(keys.root(0), own))
    assert torch.equal(found, private.noisy_counts(counts, keys.fold(keys.root(0), own)))
    assert torch.equal(found, found.round()) and float(found.min()) == 0
    assert float((found[::2, 1] - 700).std()) == pytest.approx(5, rel=0.15)


def test_a_penalty_of_which_nothing_is_known_is_refused():
    objective = BASE.objective.plus(lambda local: local.steps * 0.0)
    with pytest.raises(ValueError, match="Penalty"):
        check_protected(protect_examples(replace(BASE, objective=objective), 1.0, 1.0))


@pytest.mark.parametrize("draw", [Epochs(2, 8, uneven=0.5), Steps(8, 1, 3, "epochs")])
def test_steps_whose_number_varies_are_refused(draw):
    with pytest.raises(ValueError, match="as many steps"):
        protect_examples(replace(BASE, draw=draw), 1.0, 1.0)


def test_plain_algorithms_pass():
    check_protected(compose(protect_examples(BASE, 1.0, 1.0), fedprox(0.1)))
    assert CPU.type == "cpu"
