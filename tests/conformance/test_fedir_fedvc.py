"""FedIR and FedVC, by their own mathematics."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import BySize, Epochs, Equally, Objective, Sgd, Uniformly, Virtual
from fedlens.algorithms import fedir, fedvc
from fedlens.algorithms.fedir import LabelWeight
from fedlens.core import Batch, Facts, Local, keys
from fedlens.core.federation import Federation, Fixed, Holdings
from tests.conformance.quadratics import DOUBLE, close
from tests.federations import FEW, RAGGED, assert_equal, noisy_images, small_cnn, train

BASE = Algorithm(select=Uniformly(4), draw=Epochs(2, batch_size=8), solve=Sgd(0.1, momentum=0.5))


def weighed(counts, p, labels, losses, mask=None):
    """FedIR's loss of one batch of one client."""
    objective = compose(BASE, fedir()).objective
    objective = replace(objective, loss=lambda logits, _: logits[..., 0])
    facts = Facts(torch.tensor([sum(counts)]), torch.tensor([counts]))
    told = {"labels": {"p": torch.tensor([p], dtype=DOUBLE)}}
    local = Local({}, {}, {}, {}, told, facts, {}, {}, torch.tensor([1]))
    real = torch.ones(1, len(labels), dtype=DOUBLE) if mask is None else mask
    batch = Batch(torch.zeros(1), torch.tensor([labels]), real)
    return objective(torch.tensor([losses], dtype=DOUBLE)[..., None], batch, local)[1]


def test_weights_of_two_and_one_make_two_a_plus_b_over_three():
    # q = (1/4, 1/2, 1/4), p = (1/2, 1/2, 0): the weights are 2 and 1.
    found = weighed([1, 2, 1], [0.5, 0.5, 0.0], [0, 1], [0.7, 1.9])
    close(found, torch.tensor([(2 * 0.7 + 1.9) / 3], dtype=DOUBLE))


def test_a_class_that_p_lacks_or_the_client_lacks_weighs_nothing():
    close(weighed([2, 2], [1.0, 0.0], [0, 1], [5.0, 77.0]), torch.tensor([5.0], dtype=DOUBLE))
    close(weighed([4, 0], [0.5, 0.5], [0, 0], [5.0, 7.0]), torch.tensor([6.0], dtype=DOUBLE))
    # A label that the client's counts do not know is no infinity.
    close(weighed([4, 0], [0.5, 0.5], [0, 1], [5.0, 7.0]), torch.tensor([5.0], dtype=DOUBLE))
    close(weighed([4, 0], [0.0, 1.0], [0, 0], [5.0, 7.0]), torch.tensor([0.0], dtype=DOUBLE))


def test_over_all_that_a_client_holds_it_is_the_loss_under_p():
    """Equation 2: with weights of p / q_k the client's mean is that of the population."""
    labels = [0] * 6 + [1] * 3 + [2]
    losses = torch.rand(10, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    p = torch.tensor([0.2, 0.5, 0.3], dtype=DOUBLE)
    by_class = torch.stack([part.mean() for part in losses.split([6, 3, 1])])
    found = weighed([6, 3, 1], p.tolist(), labels, losses.tolist())
    close(found, (p * by_class).sum()[None])


def test_without_some_classes_it_is_the_loss_under_p_among_those_it_holds():
    losses = torch.tensor([0.7, 1.1, 2.3, 0.4], dtype=DOUBLE)
    found = weighed([3, 0, 1], [0.2, 0.5, 0.3], [0, 0, 0, 2], losses.tolist())
    expected = (0.2 * losses[:3].mean() + 0.3 * losses[3]) / (0.2 + 0.3)
    close(found, expected[None])


def test_padding_weighs_nothing():
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=DOUBLE)
    found = weighed([1, 2, 1], [0.5, 0.5, 0.0], [0, 1, 0], [0.7, 1.9, 9.0], mask)
    close(found, torch.tensor([(2 * 0.7 + 1.9) / 3], dtype=DOUBLE))


def test_a_batch_is_torchs_weighted_cross_entropy():
    rng = torch.Generator().manual_seed(0)
    counts, p = [7, 2, 5, 6], [0.4, 0.3, 0.2, 0.1]
    labels = torch.randint(4, (12,), generator=rng)
    logits = torch.randn(12, 4, generator=rng, dtype=DOUBLE)
    weight = torch.tensor(p, dtype=DOUBLE) / (torch.tensor(counts, dtype=DOUBLE) / 20)
    expected = F.cross_entropy(logits, labels, weight=weight, reduction="mean")
    losses = F.cross_entropy(logits, labels, reduction="none")
    found = weighed(counts, p, labels.tolist(), losses.tolist())
    close(found, expected[None])


def test_a_round_of_fedir_is_sgd_on_torchs_weighted_cross_entropy():
    federation = noisy_images([20, 13, 9])
    algorithm = compose(Algorithm(Uniformly(3), Epochs(1, 1000), solve=Sgd(0.2)), fedir())
    state = train(algorithm, rounds=1, federation=federation)
    images, labels = federation.examples.images, federation.examples.labels
    p = torch.bincount(labels, minlength=4) / len(labels)
    module = small_cnn().double()
    expected = {name: w.detach().clone() for name, w in module.named_parameters()}
    for index in torch.arange(42).split([20, 13, 9]):
        q = torch.bincount(labels[index], minlength=4).double() / len(index)
        weight = torch.where(q > 0, p.double() / q, 0)
        loss = F.cross_entropy(module(images[index]), labels[index], weight=weight)
        for name, w in module.named_parameters():
            (slope,) = torch.autograd.grad(loss, w, retain_graph=True)
            expected[name] -= len(index) / 42 * 0.2 * slope
    for name, moved in expected.items():
        close(state.params[name], moved, 1e-6)  # p is in single precision above


def alike(num_clients, per_class):
    """Clients who all hold `per_class` examples of each of four classes."""
    federation = noisy_images([400])
    by_class = [(federation.examples.labels == label).nonzero()[:, 0] for label in range(4)]
    members = [
        torch.cat([of[k * per_class : (k + 1) * per_class] for of in by_class])
        for k in range(num_clients)
    ]
    return replace(federation, split=Fixed(Holdings.of(members)))


def test_fedir_is_fedavg_byte_for_byte_where_all_clients_have_the_same_labels():
    """In single precision; in double p / q may be off one by the last bit."""
    federation = alike(6, 5)
    for dtype, exactly in ((torch.float32, True), (DOUBLE, False)):
        one, two = (
            train(a, rounds=3, federation=federation, dtype=dtype)
            for a in (BASE, compose(BASE, fedir()))
        )
        if exactly:
            assert_equal(found=two.params, expected=one.params)
        for name, w in one.params.items():
            close(two.params[name], w, 1e-12)


def test_fedir_is_fedavg_where_every_client_has_one_class():
    federation = noisy_images([200])
    members = [(federation.examples.labels == label).nonzero()[:, 0] for label in range(4)]
    federation = replace(federation, split=Fixed(Holdings.of(members)))
    one, two = (train(a, federation=federation) for a in (BASE, compose(BASE, fedir())))
    for name, w in one.params.items():
        close(two.params[name], w, 1e-12)


def test_fedir_with_a_power_of_0_is_fedavg_and_with_one_between_weighs_by_roots():
    federation = noisy_images(FEW)
    one, two, half, whole = (
        train(a, federation=federation, rounds=1)
        for a in (BASE, *(compose(BASE, fedir(power=x)) for x in (0.0, 0.5, 1.0)))
    )
    assert_equal(found=two.params, expected=one.params)
    plain = train(compose(BASE, fedir()), federation=federation, rounds=1)
    assert_equal(found=whole.params, expected=plain.params)
    assert any(not half.params[n].equal(p) for n, p in one.params.items())
    p, counts = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[8, 2, 0]])
    facts: Any = SimpleNamespace(label_counts=counts)
    told: Any = SimpleNamespace(told={"labels": {"p": p}}, facts=facts)
    batch: Any = SimpleNamespace(labels=torch.tensor([[0, 1]]), mask=torch.ones(1, 2))
    found = LabelWeight(0.5)(batch, told)
    close(found, torch.tensor([[(0.5 / 0.8) ** 0.5, (0.5 / 0.2) ** 0.5]]), 1e-6)
    with pytest.raises(ValueError, match="power"):
        compose(BASE, fedir(power=-1.0))


def test_p_may_be_given_and_need_not_sum_to_one():
    federation = noisy_images(FEW)
    own = torch.bincount(federation.examples.labels, minlength=4).tolist()
    one = train(compose(BASE, fedir()), federation=federation)
    two = train(compose(BASE, fedir(p=tuple(map(float, own)))), federation=federation)
    assert_equal(found=two.params, expected=one.params)
    other = train(compose(BASE, fedir(p=(0.7, 0.1, 0.1, 0.1))), federation=federation)
    assert not torch.equal(other.params["5.weight"], one.params["5.weight"])
    for wrong in ((0.5, 0.5), (0.0,) * 4, (-1.0, 1.0, 1.0, 1.0)):
        with pytest.raises(ValueError, match="shares"):
            train(compose(BASE, fedir(p=wrong)), federation=federation)


def test_what_clients_hold_is_disclosed_only_if_p_is_to_be_found_from_it():
    assert compose(BASE, fedir()).discloses == {"label_counts"}
    assert not compose(BASE, fedir(p=(0.25,) * 4)).discloses


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_fedvc_is_fedavg_byte_for_byte_where_clients_have_the_size_of_virtual_ones(dtype):
    federation = noisy_images([16] * 7)
    base = replace(BASE, draw=Epochs(1, batch_size=8))
    virtual = compose(base, fedvc(size=16, replacement=False))
    one, two = (train(a, rounds=3, federation=federation, dtype=dtype) for a in (base, virtual))
    assert_equal(found=two.params, expected=one.params)


def test_every_virtual_client_takes_size_over_batch_steps_and_counts_the_same():
    algorithm = compose(replace(BASE, draw=Epochs(9, batch_size=8)), fedvc(size=24))
    holdings = noisy_images(RAGGED).everyone(0)
    plan = algorithm.draw(holdings, keys.fold(keys.root(0), torch.arange(10)))
    assert (plan.steps == 3).all() and (plan.counts == 8).all()
    assert plan.index.shape == (10, 3, 8)
    assert algorithm.weigh == Equally()


def test_repeats_are_drawn_only_by_clients_that_have_too_little():
    holdings = noisy_images(RAGGED).everyone(0)
    plan = Virtual(24, 8)(holdings, keys.fold(keys.root(0), torch.arange(10)))
    for client, size in enumerate(RAGGED):
        drawn = plan.index[client].flatten().tolist()
        assert set(drawn) <= set(holdings.members(client).tolist())
        assert (len(set(drawn)) == 24) is (size >= 24), client


def test_repeats_are_uniform():
    holdings = noisy_images([5]).everyone(0).take(torch.zeros(1000, dtype=torch.int64))
    plan = Virtual(16, 8)(holdings, keys.fold(keys.root(0), torch.arange(1000)))
    found = torch.bincount(plan.index.flatten(), minlength=5) / 16_000
    assert (found - 0.2).abs().max() < 4 * (0.2 * 0.8 / 16_000) ** 0.5


def test_clients_are_drawn_in_proportion_to_what_they_hold():
    """11 clients of which one holds 30%: only with replacement is it 30% of the picks."""
    federation = noisy_images([7] * 10 + [30])

    def picks(replacement):
        select = BySize(10, replacement)
        drawn = [select(federation, r, keys.fold(keys.root(0), r)) for r in range(1000)]
        return torch.bincount(torch.cat(drawn), minlength=11) / 10_000

    spread = (0.3 * 0.7 / 10_000) ** 0.5
    assert abs(float(picks(True)[10]) - 0.3) < 4 * spread
    assert (picks(True)[:10] - 0.07).abs().max() < 4 * (0.07 * 0.93 / 10_000) ** 0.5
    assert float(picks(False)[10]) == pytest.approx(0.1, abs=1e-3)


def test_without_replacement_equal_sizes_give_fedavgs_own_choice():
    federation = noisy_images([3] * 30)
    for round in range(50):
        key = keys.fold(keys.root(1), round)
        same = BySize(6, replacement=False)(federation, round, key.clone())
        assert torch.equal(same, Uniformly(6)(federation, round, key.clone()))


def test_clients_that_hold_nothing_are_not_drawn():
    whole = noisy_images([4, 4])
    holdings = Holdings.of([torch.arange(0), torch.arange(4), torch.arange(0), torch.arange(4, 8)])
    federation = Federation(whole.examples, 4, Fixed(holdings))
    for round in range(100):
        for select in (BySize(2), BySize(2, replacement=False)):
            assert set(select(federation, round, keys.fold(keys.root(0), round)).tolist()) <= {1, 3}


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_client_that_holds_nothing_sees_nothing(empty):
    held = [torch.arange(4), torch.arange(4, 8)]
    held.insert(empty, torch.arange(0))
    plan = Virtual(4, 2)(Holdings.of(held), keys.fold(keys.root(0), torch.arange(3)))
    assert plan.counts.sum(1).tolist() == [0 if client == empty else 4 for client in range(3)]
    for client, own in enumerate(held):
        seen = plan.index[client][plan.counts[client] > 0]
        assert set(seen.flatten().tolist()) == set(own.tolist())


def test_a_client_drawn_twice_is_two_virtual_clients():
    """Of one client that holds everything: both copies train on draws of their own."""
    federation = noisy_images([64])
    base = replace(BASE, select=Uniformly(2), draw=Epochs(1, batch_size=8))
    twice = train(compose(base, fedvc(size=16)), rounds=1, federation=federation)
    alone = train(
        compose(replace(base, select=Uniformly(1)), fedvc(size=16)), rounds=1, federation=federation
    )
    moved = (twice.params["5.weight"] - alone.params["5.weight"]).norm()
    assert moved > 1e-3  # the mean of a draw with itself would be that draw


def test_a_size_that_does_not_fill_batches_is_refused():
    for size in (20, 0, -8):
        with pytest.raises(ValueError, match="multiple"):
            compose(BASE, fedvc(size=size))


def test_weighing_by_examples_again_is_offered():
    algorithm = compose(BASE, fedvc(size=16, weigh="examples"))
    one, two = (train(a) for a in (algorithm, compose(BASE, fedvc(size=16))))
    assert not torch.equal(one.params["5.weight"], two.params["5.weight"])


def test_under_fedvc_q_is_that_of_all_a_client_holds():
    """What FedIR divides by are the client's own counts, not those of the examples drawn."""
    counts = noisy_images([40, 40]).label_counts(noisy_images([40, 40]).everyone(0))
    seen = []

    def spy(batch, local):
        seen.append(local.facts.label_counts.clone())
        return torch.ones_like(batch.mask)

    base = replace(BASE, select=Uniformly(2), objective=Objective().times(spy))
    train(compose(base, fedvc(size=8), fedir()), rounds=1, federation=noisy_images([40, 40]))
    assert all(any(torch.equal(row[0], own) for own in counts) for row in seen) and seen
