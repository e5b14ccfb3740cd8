"""Losses and their options: what torch or the paper says of each."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedlens as fl
from fedlens.algorithm import numbers_of, same_but_numbers, side_by_side
from fedlens.algorithm.pieces import ByEffectiveNumber, Objective
from fedlens.algorithm.pieces.losses import (
    LossWith,
    binary_cross_entropy,
    cross_entropy,
    focal,
    with_options,
)
from fedlens.core import Batch, Facts, Local, Number
from fedlens.core.label_sets import MOST, packed, unpacked
from fedlens.setup.algorithm import make_algorithm
from tests.toys import toy

DOUBLE = torch.float64


def answers(scale: float = 3.0) -> tuple[Tensor, Tensor]:  # [2, 6, 4], [2, 6]
    rng = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(2, 6, 4, generator=rng, dtype=DOUBLE)
    return logits, torch.randint(4, (2, 6), generator=rng)


def in_torch(logits: Tensor, labels: Tensor, share: float) -> Tensor:
    return F.cross_entropy(logits.mT, labels, reduction="none", label_smoothing=share)


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_labels_are_smoothed_as_in_torch(share):
    logits, labels = answers()
    found = cross_entropy(logits, labels, label_smoothing=share)
    torch.testing.assert_close(found, in_torch(logits, labels, share))


def test_each_client_may_have_numbers_of_its_own():
    logits, labels = answers()
    each = torch.tensor([0.1, 0.4], dtype=DOUBLE)
    found = cross_entropy(logits, labels, label_smoothing=each)
    for client, share in enumerate(each.tolist()):
        expected = in_torch(logits, labels, share)[client]
        torch.testing.assert_close(found[client], expected)
        alone = binary_cross_entropy(logits, labels, positive_weight=share)[client]
        found_too = binary_cross_entropy(logits, labels, positive_weight=each)[client]
        torch.testing.assert_close(found_too, alone)
        alone = focal(logits, labels, gamma=share)[client]
        torch.testing.assert_close(focal(logits, labels, gamma=each)[client], alone)


@pytest.mark.parametrize("num_labels", [1, 5, MOST])
def test_labels_come_back_from_the_number_that_they_are_kept_as(num_labels):
    rows = torch.randint(2, (3, 7, num_labels))
    rows[0, 0], rows[0, 1] = 1, 0
    assert torch.equal(unpacked(packed(rows), num_labels), rows)
    assert int(packed(rows).min()) >= 0


@pytest.mark.parametrize("weight", [1.0, 0.0, 3.5])
def test_binary_cross_entropy_is_the_mean_over_labels_of_torchs(weight):
    logits, _ = answers()
    rows = torch.randint(2, logits.shape)
    found = binary_cross_entropy(logits, packed(rows), positive_weight=weight)
    expected = F.binary_cross_entropy_with_logits(
        logits, rows.double(), reduction="none", pos_weight=torch.tensor(weight, dtype=DOUBLE)
    )
    torch.testing.assert_close(found, expected.mean(-1))
    p = logits.sigmoid()  # and the closed form
    closed = -(weight * rows * p.log() + (1 - rows) * (1 - p).log()).mean(-1)
    torch.testing.assert_close(found, closed)


def test_binary_cross_entropy_pulls_each_label_by_itself():
    logits, _ = answers()
    rows = torch.randint(2, logits.shape)
    logits.requires_grad_()
    (slope,) = torch.autograd.grad(binary_cross_entropy(logits, packed(rows)).sum(), logits)
    torch.testing.assert_close(slope, (logits.sigmoid() - rows).detach() / logits.shape[-1])


def test_mixed_images_have_the_loss_of_mixed_labels():
    """It is linear in the labels, so that mixup's two losses are one of labels between 0 and 1."""
    logits, _ = answers()
    one, other = torch.randint(2, (2, *logits.shape))
    both = 0.3 * binary_cross_entropy(logits, packed(one))
    both = both + 0.7 * binary_cross_entropy(logits, packed(other))
    labels = 0.3 * one.double() + 0.7 * other.double()
    soft = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    torch.testing.assert_close(both, soft.mean(-1))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_is_the_papers(gamma):
    logits, labels = answers()
    p = logits.softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(focal(logits, labels, gamma=gamma), -((1 - p) ** gamma) * p.log())


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_has_a_gradient_where_a_model_is_sure(gamma):
    logits, labels = answers(scale=1e4)
    logits.requires_grad_()
    (slope,) = torch.autograd.grad(focal(logits, labels, gamma=gamma).sum(), logits)
    assert slope.isfinite().all()


def weights(beta: Number, counts: Tensor, labels: Tensor) -> Tensor:
    clients = len(counts)
    local = Local({}, {}, {}, {}, {}, Facts(counts.sum(1), counts), {}, {}, torch.ones(clients))
    mask = torch.ones(labels.shape, dtype=DOUBLE)
    return ByEffectiveNumber(beta)(Batch(torch.zeros(0), labels, mask), local)


def test_weights_by_hand():
    """n = 1, 2, 0 and beta = 1/2: effective numbers 1, 3/2; the absent class never occurs."""
    found = weights(0.5, torch.tensor([[1, 2, 0]]), torch.tensor([[0, 1, 1]]))
    torch.testing.assert_close(found, torch.tensor([[1, 2 / 3, 2 / 3]], dtype=DOUBLE))


def test_beta_goes_from_examples_that_count_alike_to_classes_that_do():
    counts, labels = torch.tensor([[2, 30], [7, 5]]), torch.tensor([[0, 1], [0, 1]])
    assert torch.equal(weights(0.0, counts, labels), torch.ones(2, 2, dtype=DOUBLE))
    for beta in (1 - 1e-9, 1.0):
        found = weights(beta, counts, labels)
        torch.testing.assert_close(found * counts, torch.ones(2, 2, dtype=DOUBLE))
    each = weights(torch.tensor([1.0, 0.9], dtype=DOUBLE), counts, labels)
    torch.testing.assert_close(each[0], 1 / counts[0].double())
    torch.testing.assert_close(each[1], weights(0.9, counts, labels)[1])


def test_a_balanced_batch_is_torchs_weighted_cross_entropy():
    logits, labels = answers()
    counts = torch.tensor([[1, 5, 9, 3], [2, 2, 40, 1]])
    local = Local({}, {}, {}, {}, {}, Facts(counts.sum(1), counts), {}, {}, torch.ones(2))
    objective = Objective().times(ByEffectiveNumber(0.9))
    mask = torch.ones(labels.shape, dtype=DOUBLE)
    found, _ = objective(logits, Batch(torch.zeros(0), labels, mask), local)
    for client in range(2):
        by_class = (1 - 0.9) / (1 - 0.9 ** counts[client].double())
        expected = F.cross_entropy(logits[client], labels[client], weight=by_class)
        torch.testing.assert_close(found[client], expected)


def test_a_loss_with_its_defaults_is_the_function_itself():
    assert with_options(cross_entropy, {"label_smoothing": 0.0}) is cross_entropy
    assert with_options(focal, {"gamma": 2.0}) is focal


def test_losses_that_differ_in_numbers_train_side_by_side():
    one, two = (with_options(focal, {"gamma": gamma}) for gamma in (1.0, 3.0))
    assert same_but_numbers(one, two)
    assert numbers_of([one, two]) == [[1.0, 3.0]]
    together = side_by_side([one, two], torch.zeros(0, dtype=DOUBLE))
    logits, labels = answers()
    for client, alone in enumerate((one, two)):
        found = together(logits, labels)[client]
        torch.testing.assert_close(found, alone(logits, labels)[client])


def margin(logits, labels, *, least: float = 1.0, kind: str = "hinge"):
    """A loss of somebody's own, with options."""
    right = logits.gather(-1, labels[..., None])
    return (least - right + logits).clamp(min=0).sum(-1)


def test_a_loss_of_ones_own_has_options():
    def described(**options):
        loss = {"name": f"{__name__}:margin", **options}
        return fl.Experiment(dataset=toy(), model="linear", rounds=1, loss=loss)

    assert make_algorithm(described()).objective.loss is margin
    made = make_algorithm(described(least=2)).objective.loss
    assert made == LossWith(margin, others=(("least", 2.0), ("kind", "hinge")))
    assert fl.run(described(least=2)).records[0]["train_loss"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"name": "cross_entropy", "label_smoothing": 1.5}}, "choose 0 to 1"),
        ({"loss": {"name": "focal", "gamma": -1}}, "gamma is -1.0: choose 0 or more"),
        ({"loss": {"name": "focal", "alpha": 1}}, "no option 'alpha': choose one of gamma"),
        ({"loss": "focale"}, "did you mean 'focal'"),
        ({"local": {"class_balance": 1.1}}, "local.class_balance is 1.1: choose 0 to 1"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        fl.run(fl.Experiment(dataset=toy(), model="linear", rounds=1, **changes))
    assert "\n" not in str(caught.value)
