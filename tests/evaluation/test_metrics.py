"""Metrics, with scikit-learn as the oracle."""

from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.core.federation import Holdings
from fedlens.evaluation.metrics import Tally, accuracy_by_client, metrics, spread
from tests.later import Later

oracle = Later("sklearn.metrics")


def answers(num_classes, outputs, count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (count,), generator=generator)
    logits = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    logits += F.one_hot(labels, outputs) * (seed % 3)
    return logits, labels


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 1000))
def test_metrics_are_scikit_learns(num_classes, count, seed):
    logits, labels = answers(num_classes, num_classes, count, seed)
    got = metrics(Tally.of(logits, labels, num_classes))
    predicted = logits.argmax(1)
    expected = oracle.precision_recall_fscore_support(
        labels, predicted, average="macro", zero_division=0
    )
    for name, value in zip(("precision", "recall", "f1"), expected[:3], strict=True):
        assert got[name] == pytest.approx(value, abs=1e-12)
    assert got["accuracy"] == pytest.approx(oracle.accuracy_score(labels, predicted))
    assert got["loss"] == pytest.approx(F.cross_entropy(logits, labels).item())


def test_top5_is_scikit_learns():
    logits, labels = answers(12, 12, 200, 1)
    expected = oracle.top_k_accuracy_score(labels, logits, k=5, labels=range(12))
    assert metrics(Tally.of(logits, labels, 12))["top5"] == pytest.approx(expected)


def test_with_five_classes_or_fewer_top5_is_always_right():
    logits, labels = answers(4, 4, 30, 0)
    assert metrics(Tally.of(logits, labels, 4))["top5"] == 1


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(0, 5), st.integers(1, 30), st.integers(0, 1000))
def test_macro_f1_is_at_most_the_mean_of_precision_and_recall(num_classes, more, count, seed):
    logits, labels = answers(num_classes, num_classes + more, count, seed)
    got = metrics(Tally.of(logits, labels, num_classes))
    assert got["f1"] <= (got["precision"] + got["recall"]) / 2 + 1e-12
    assert got["top5"] >= got["accuracy"] - 1e-12


def test_predicting_an_output_that_is_no_class_is_wrong():
    logits, labels = answers(10, 1000, 300, 2)
    logits[:100, 700] = 50.0
    tally = Tally.of(logits, labels, 10)
    predicted = logits.argmax(1).clamp(max=10)
    expected = oracle.confusion_matrix(labels, predicted, labels=range(11))[:10]
    assert np.array_equal(tally.confusion.numpy(), expected)
    assert tally.confusion[:, 10].sum() >= 100
    scores = oracle.precision_recall_fscore_support(
        labels, predicted, labels=range(10), average="macro", zero_division=0
    )
    got = metrics(tally)
    assert [got[k] for k in ("precision", "recall", "f1")] == pytest.approx(scores[:3])
    assert got["accuracy"] == pytest.approx((predicted == labels).double().mean().item())


@settings(deadline=None)
@given(st.lists(st.integers(0, 39), max_size=4))
def test_batches_add_up_to_the_whole(cuts):
    logits, labels = answers(7, 7, 40, 5)
    whole = Tally.of(logits, labels, 7)
    edges = [0, *sorted(cuts), 40]
    parts = (Tally.of(logits[a:b], labels[a:b], 7) for a, b in pairwise(edges))
    total = reduce(add, parts)
    assert torch.equal(total.confusion, whole.confusion) and total.top5 == whole.top5
    assert metrics(total) == pytest.approx(metrics(whole))


def test_another_loss_may_be_given():
    logits, labels = answers(3, 3, 10, 1)
    tally = Tally.of(logits, labels, 3, losses=torch.arange(10.0))
    assert metrics(tally)["loss"] == pytest.approx(4.5)


def test_losses_of_low_precision_logits_are_summed_in_float64():
    logits = torch.zeros(5000, 10, dtype=torch.bfloat16, requires_grad=True)
    tally = Tally.of(logits, torch.zeros(5000, dtype=torch.int64), 10)
    assert tally.loss.dtype == torch.float64 and not tally.loss.requires_grad
    assert metrics(tally)["loss"] == pytest.approx(np.log(10), rel=1e-6)


def test_too_few_outputs_and_no_examples_are_refused():
    logits, labels = answers(3, 3, 10, 1)
    with pytest.raises(ValueError, match="3 outputs"):
        Tally.of(logits, labels, 4)
    with pytest.raises(ValueError, match="no examples"):
        metrics(Tally.of(logits[:0], labels[:0], 3))


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=9))
def test_the_spread_over_clients_is_numpys(hits):
    sizes = [len(h) for h in hits]
    edges = np.cumsum([0, *sizes])
    members = [torch.arange(a, b) for a, b in pairwise(edges)]
    correct = torch.tensor([hit for h in hits for hit in h], dtype=torch.bool)
    got = spread(accuracy_by_client(correct, Holdings.of(members)))
    accuracy = [np.mean(h) for h in hits if h]
    if not accuracy:
        assert got == {}
        return
    assert got == pytest.approx(
        {
            "mean": np.mean(accuracy),
            "std": np.std(accuracy),
            "min": np.min(accuracy),
            "p10": np.percentile(accuracy, 10),
            "median": np.median(accuracy),
            "max": np.max(accuracy),
            "worst_decile": np.min(accuracy),  # of fewer than twenty clients, one
            "jain": np.sum(accuracy) ** 2 / (len(accuracy) * np.sum(np.square(accuracy)))
            if np.any(accuracy)
            else 1,
        }
    )


def test_an_answer_for_each_example_held_is_needed():
    holdings = Holdings.of([torch.arange(3)])
    with pytest.raises(ValueError, match="2 answers"):
        accuracy_by_client(torch.ones(2, dtype=torch.bool), holdings)
