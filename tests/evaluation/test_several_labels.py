"""Measures of images that may have several labels: scikit-learn's numbers, and some by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

from fedlens.evaluation.metrics import (
    Tally,
    auroc,
    average_precision,
    from_logits,
    metrics,
    of_labels,
)
from tests.later import Later

oracle = Later("sklearn.metrics")


def answers(num_labels, count, seed):
    """Logits with ties, of images of which all, some or none may have a label."""
    rng = np.random.default_rng([seed, 2])
    labels = torch.from_numpy(
        (rng.random((count, num_labels)) < rng.random(num_labels)).astype(int)
    )
    distinct = torch.from_numpy(rng.normal(size=(10, num_labels)))
    return distinct[torch.from_numpy(rng.integers(10, size=count))], labels


cases = given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 1000))


@settings(max_examples=50)
@cases
def test_ranks_of_each_label_are_scikit_learns(num_labels, count, seed):
    logits, labels = answers(num_labels, count, seed)
    found = from_logits([], logits, labels)
    for k, (score, positive) in enumerate(zip(logits.T.numpy(), labels.T.numpy(), strict=True)):
        both, some = 0 < positive.sum() < count, positive.any()
        area = oracle.roc_auc_score(positive, score) if both else math.nan
        precision = oracle.average_precision_score(positive, score) if some else math.nan
        assert float(found["auroc"][k]) == pytest.approx(area, nan_ok=True)
        assert float(found["average_precision"][k]) == pytest.approx(precision, nan_ok=True)


@settings(max_examples=50)
@cases
def test_counts_are_scikit_learns(num_labels, count, seed):
    logits, labels = answers(num_labels, count, seed)
    said = logits > 0
    got = metrics(Tally.of(logits, labels, num_labels))
    scores = [
        oracle.precision_recall_fscore_support(one, its, average="binary", zero_division=0)[:3]
        for one, its in zip(labels.T, said.T, strict=True)
        if (one.bool() | its).any()  # macro averages leave out what never occurs
    ]
    macro = [math.nan] * 3 if not scores else np.mean(scores, 0)
    assert [got[k] for k in ("precision", "recall", "f1")] == pytest.approx(macro, nan_ok=True)
    assert got["accuracy"] == pytest.approx(oracle.accuracy_score(labels, said))
    assert got["loss"] == pytest.approx(
        float(binary_cross_entropy_with_logits(logits, labels.double()))
    )
    assert "top5" not in got and got["classes_predicted"] == int(said.any(0).sum())


def test_numbers_that_can_be_checked_by_hand():
    """Label a is ranked +, +, -, -; b is ranked -, +, -, + from the highest score down."""
    logits = torch.tensor([[4.0, 2.0], [3.0, -1.0], [-1.0, 4.0], [-2.0, 1.0]])
    labels = torch.tensor([[1, 1], [1, 1], [0, 0], [0, 0]])
    values = from_logits([], logits, labels)
    tally = Tally.of(logits, labels, 2)
    found = of_labels(tally, values, ["a", "b"])
    assert found["a"] == {"images": 2, "f1": 1.0, "auroc": 1.0, "average_precision": 1.0}
    # b: of 2 × 2 pairs one is in order; at its images the precision is 1/2 and 2/4.
    assert found["b"]["auroc"] == 0.25 and found["b"]["average_precision"] == 0.5
    assert found["b"]["f1"] == pytest.approx(2 * 1 / (2 + 3))
    assert metrics(tally)["accuracy"] == 1 / 4  # of the first image alone all labels are right
    assert metrics(tally)["f1"] == pytest.approx((1 + 0.4) / 2)


def test_batches_add_up_to_the_whole():
    logits, labels = answers(5, 40, 1)
    parts = [Tally.of(logits[a:b], labels[a:b], 5) for a, b in ((0, 7), (7, 40))]
    assert metrics(parts[0] + parts[1]) == pytest.approx(metrics(Tally.of(logits, labels, 5)))


def test_of_one_label_an_image_average_precision_is_that_of_each_class_against_the_rest():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 4, generator=rng, dtype=torch.float64)
    labels = torch.randint(4, (60,), generator=rng)
    one_hot = torch.nn.functional.one_hot(labels, 4)
    expected = oracle.average_precision_score(one_hot, logits.softmax(1), average="macro")
    assert float(average_precision(logits, labels)) == pytest.approx(expected)
    scores = from_logits([], logits.log_softmax(1), one_hot)
    assert float(auroc(logits, labels)) == pytest.approx(float(scores["auroc"].mean()))


def test_a_label_that_no_image_has_is_left_out_of_means_and_nothing_is_said_of_it():
    logits, labels = answers(3, 30, 4)
    labels[:, 1] = 0
    found = of_labels(Tally.of(logits, labels, 3), from_logits([], logits, labels), "abc")
    assert found["b"]["images"] == 0 and math.isnan(found["b"]["auroc"])
    assert math.isnan(found["b"]["average_precision"])
    assert all(found[name]["average_precision"] > 0 for name in "ac")
