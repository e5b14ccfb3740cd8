"""Mixup: shares, partners, and the loss of two labels."""

import pytest
import torch
import torch.nn.functional as F

from fedlens.algorithm.pieces import ByEffectiveNumber, Objective
from fedlens.core import Batch, Facts, Local, keys
from fedlens.data.augment import Augment
from fedlens.data.augment.changes import Mixture, mixture
from tests.later import Later

stats = Later("scipy.stats")

DOUBLE = torch.float64


def drawn(alpha: float, clients: int = 4, size: int = 5000) -> Mixture:
    row_key = keys.fold(keys.root(1), torch.arange(clients * size)).view(clients, size)
    return mixture(row_key, torch.arange(1, clients + 1), alpha)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.5, 1.0, 4.0])
def test_shares_have_the_beta_distribution(alpha):
    share = drawn(alpha).share.flatten()
    assert share.dtype is DOUBLE and share.min() >= 0 and share.max() <= 1
    if alpha > 0.1:  # else much of it is nearer to 0 than float64 can say
        statistic = stats.kstest(share.numpy(), stats.beta(alpha, alpha).cdf).statistic
        assert statistic < 0.012  # p < 0.01
    assert abs(share.var() - 1 / (4 * (2 * alpha + 1))) < 0.005


def test_partners_are_any_example_of_the_same_client_and_no_padding():
    partner = drawn(1.0).partner
    for client in range(4):
        found, times = partner[client].unique(return_counts=True)
        assert found.tolist() == list(range(client + 1))
        assert (times / 5000 - 1 / (client + 1)).abs().max() < 0.04


@pytest.mark.parametrize("dtype", [torch.uint8, DOUBLE])
def test_images_are_mixed_by_their_shares(dtype):
    images = torch.tensor([10.0, 200.0, 60.0]).view(1, 3, 1, 1, 1).to(dtype)
    mixed = Mixture(torch.tensor([[1, 1, 0]]), torch.tensor([[0.75, 0.5, 0.1]], dtype=DOUBLE))
    found = mixed.of_images(images)
    assert found.dtype is dtype
    exact = torch.tensor([57.5, 200.0, 15.0], dtype=DOUBLE)
    assert (found.flatten().double() - exact).abs().max() <= (0.5 if dtype is torch.uint8 else 0)


def some_batch() -> tuple[torch.Tensor, Batch, Mixture]:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 3, generator=rng, dtype=DOUBLE)
    labels = torch.randint(3, (2, 4), generator=rng)
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0]], dtype=DOUBLE)
    share = torch.rand(2, 4, generator=rng, dtype=DOUBLE)
    partner = torch.tensor([[1, 3, 0, 2], [2, 2, 0, 1]])
    return logits, Batch(torch.zeros(2, 4, 1), labels, mask), Mixture(partner, share)


def local(counts: torch.Tensor) -> Local:
    return Local({}, {}, {}, {}, {}, Facts(counts.sum(1), counts), {}, {}, torch.ones(2))


def test_the_loss_is_the_papers():
    logits, batch, mixed = some_batch()
    found, _ = Objective()(*mixed.two_labels(logits, batch), local(torch.ones(2, 3)))
    for client in range(2):
        each = []
        for row in range(int(batch.mask[client].sum())):
            share, other = mixed.share[client, row], mixed.partner[client, row]
            one, two = (
                F.cross_entropy(logits[client, row], batch.labels[client, which])
                for which in (row, int(other))
            )
            each.append(share * one + (1 - share) * two)
        torch.testing.assert_close(found[client], torch.stack(each).mean())


def test_weights_by_label_weigh_both_labels():
    logits, batch, mixed = some_batch()
    counts = torch.tensor([[1, 5, 9], [4, 1, 2]])
    objective = Objective().times(ByEffectiveNumber(0.9))
    found, _ = objective(*mixed.two_labels(logits, batch), local(counts))
    for client in range(2):
        weight = (1 - 0.9) / (1 - 0.9 ** counts[client].double())
        total = weights = torch.zeros((), dtype=DOUBLE)
        for row in range(int(batch.mask[client].sum())):
            share = mixed.share[client, row]
            for which, part in ((row, share), (int(mixed.partner[client, row]), 1 - share)):
                label = batch.labels[client, which]
                w = part * weight[label]
                total = total + w * F.cross_entropy(logits[client, row], label)
                weights = weights + w
        torch.testing.assert_close(found[client], total / weights)


def test_without_mixup_nothing_is_mixed():
    key = keys.fold(keys.root(0), torch.arange(2))
    assert Augment(flip=True).mixture(key, torch.tensor([3, 2]), 4) is None
    everyone = Augment(mixup=0.2).mixture(key, torch.tensor([3, 2]), 4)
    alone = Augment(mixup=0.2).mixture(key[1:], torch.tensor([2]), 4)
    assert everyone is not None and alone is not None
    assert torch.equal(everyone.partner[1:], alone.partner)
    assert torch.equal(everyone.share[1:], alone.share)
