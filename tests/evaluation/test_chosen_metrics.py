"""Metrics that are asked for: scikit-learn's numbers, and functions of a user's own."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlens as fl
from fedlens.config.names import METRICS
from fedlens.config.sections import ALWAYS_MEASURED
from fedlens.evaluation.measures import CHOSEN, OF_PART
from fedlens.evaluation.metrics import Tally, auroc, balanced_accuracy, ece, kappa, reliability
from tests.later import Later
from tests.toys import toy

oracle = Later("sklearn.metrics")


def answers(num_classes, count, seed):
    """Logits with ties, for labels of which some class may be missing."""
    rng = np.random.default_rng([seed, 1])
    labels = torch.from_numpy(rng.integers(num_classes, size=count))
    distinct = torch.from_numpy(rng.normal(size=(10, num_classes)))
    return distinct[torch.from_numpy(rng.integers(10, size=count))], labels


cases = given(st.integers(2, 6), st.integers(2, 40), st.integers(0, 1000))


@settings(deadline=None, max_examples=50)
@cases
def test_metrics_of_counts_are_scikit_learns(num_classes, count, seed):
    logits, labels = answers(num_classes, count, seed)
    counts = Tally.of(logits, labels, num_classes).confusion
    predicted = logits.argmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are predicted alone, or alone there
        expected = (
            oracle.balanced_accuracy_score(labels, predicted),
            oracle.cohen_kappa_score(labels, predicted),
        )
    assert float(balanced_accuracy(counts)) == pytest.approx(expected[0])
    assert float(kappa(counts)) == pytest.approx(expected[1], nan_ok=True)


@settings(deadline=None, max_examples=50)
@cases
def test_auroc_is_scikit_learns_for_each_class_against_the_rest(num_classes, count, seed):
    logits, labels = answers(num_classes, count, seed)
    probabilities = logits.softmax(1).numpy()
    present = [k for k in range(num_classes) if 0 < int((labels == k).sum()) < count]
    areas = [oracle.roc_auc_score(labels.numpy() == k, probabilities[:, k]) for k in present]
    expected = np.mean(areas) if areas else math.nan
    assert float(auroc(logits, labels)) == pytest.approx(expected, nan_ok=True)


def test_with_two_classes_auroc_is_the_binary_one():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, (50,), generator=generator)
    expected = oracle.roc_auc_score(labels, logits.softmax(1)[:, 1])
    assert float(auroc(logits, labels)) == pytest.approx(expected)


def test_the_calibration_error_is_its_definition():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(300, 4, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(4, (300,), generator=generator)
    confidence, predicted = (part.numpy() for part in logits.softmax(1).max(1))
    right = predicted == labels.numpy()
    expected = 0.0
    for low, high in zip(np.arange(10) / 10, np.arange(1, 11) / 10, strict=True):
        within = (confidence > low) & (confidence <= high)
        if within.any():
            expected += within.mean() * abs(confidence[within].mean() - right[within].mean())
    assert float(ece(logits, labels, bins=10)) == pytest.approx(expected)
    count, _, hits = reliability(logits, labels, 10)
    assert count.sum() == 300
    assert hits.sum() == right.sum()


def test_a_model_that_is_as_sure_as_it_is_right_has_no_calibration_error():
    logits = torch.tensor([[0.75, 0.25]]).log().expand(4, 2)
    assert float(ece(logits, torch.tensor([0, 0, 0, 1]))) == pytest.approx(0.0, abs=1e-7)


def share_of_first(counts):
    return counts[:, 0].sum() / counts.sum()


def mean_logit(logits, labels, *, times: float = 1.0):
    assert len(logits) == len(labels)
    return float(logits.mean()) * times


def a_list(counts):
    return counts.tolist()


def loss(counts):
    return 0.0


def nothing(counts):
    counts.sum()


def one_a_class(counts):
    return counts.diagonal() / counts.sum(1)


def raises(logits, labels):
    raise KeyError("recall")


def of_other_shapes(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels[1:])


def no_arguments():
    return 1.0


OWN = "tests.evaluation.test_chosen_metrics"


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_run_records_metrics_by_name_and_of_ones_own(engine, tmp_path):
    own = {"name": f"{OWN}:mean_logit", "times": 2.0}
    names = [*METRICS, f"{OWN}:share_of_first"]
    described = fl.Experiment(
        dataset=toy(),
        model="linear",
        rounds=2,
        engine=engine,
        clients=fl.Clients(count=3),
        evaluate=fl.Evaluate(on=("test", "train"), metrics=[*names, own]),
    )
    result = fl.run(described, tmp_path / "run")
    wanted = {*METRICS, "share_of_first", "mean_logit"}
    for record in result.records:
        assert {f"{part}_{name}" for part in ("test", "train") for name in wanted} <= record.keys()
    # toy has as many examples of each class, and is its own training set
    final, best = result.summary["final"], result.summary["best"]
    assert final["test_balanced_accuracy"] == pytest.approx(final["test_accuracy"])
    assert final["test_auroc"] == final["train_auroc"]
    errors = [record["test_ece"] for record in result.records]
    assert best["test_ece"]["value"] == min(errors)  # less is better
    assert "test_mean_logit" not in best  # nobody knows which way is better


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["kapa"], "unknown metric 'kapa': did you mean 'kappa'"),
        (["ece", "ece"], "'ece' is measured already"),
        ([f"{OWN}:loss"], "'loss' is measured already"),
        ([{"name": "ece", "bin": 3}], "no option 'bin'"),
        ([f"{OWN}:no_arguments"], "takes 0 arguments: let it take counts, or logits and labels"),
        ([f"{OWN}:a_list"], r"'a_list', a_list \(test_chosen_metrics.py, line \d+\), gave \[\["),
        ([f"{OWN}:nothing"], "gave None: let it return one number"),
        ([f"{OWN}:one_a_class"], r"gave a tensor \[3\]: let it return one number"),
        ([f"{OWN}:raises"], r"'raises', test_chosen_metrics.py, line \d+, in raises: KeyError"),
        ([f"{OWN}:of_other_shapes"], r"line \d+, in of_other_shapes: ValueError: Expected input"),
        ([{"name": "ece", "bins": 0}], "bins is 0: choose 1 or more"),
    ],
)
def test_a_metric_that_cannot_be_is_refused_in_one_line_before_training(metrics, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fl.run(
            fl.Experiment(
                dataset=toy(),
                model="linear",
                rounds=1,
                engine="sequential",
                evaluate=fl.Evaluate(metrics=metrics),
            ),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_what_is_always_measured_and_what_is_chosen_is_declared():
    assert set(ALWAYS_MEASURED) == set(OF_PART)
    assert list(METRICS) == list(CHOSEN)
