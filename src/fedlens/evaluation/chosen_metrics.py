"""The metrics that `evaluate.metrics` may name, and how they and user-defined ones are called.

A metric with one argument receives the counts [L, L + 1]: true label, prediction; the last column
is "no label". A metric with two arguments receives the logits [N, outputs] and labels [N] of all
examples, on the device of the evaluation. Both return one number, as a float or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from fedlens.config.experiment import Experiment, Named
from fedlens.config.names import METRICS
from fedlens.config.options import call, find
from fedlens.config.own_code import place_of, place_of_error
from fedlens.evaluation.metrics import Tally
from fedlens.storage.reading import shortened

BINS = 15  # bins of confidence, for `ece`


@dataclass(frozen=True)
class Metric:
    name: str  # in records it follows the name of the part
    function: Callable[..., Any]
    reads_logits: bool
    options: dict[str, Any]

    @classmethod
    def of(cls, named: Named) -> Metric:
        function = find(METRICS, named.name, "metric")
        by_position = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
        num_handed = sum(p.kind in by_position for p in signature(function).parameters.values())
        if num_handed not in (1, 2):
            raise ValueError(
                f"metric {named.name!r} takes {num_handed} arguments: let it take counts, or "
                "logits and labels; options are keyword-only"
            )
        return cls(named.name.rpartition(":")[2], function, num_handed == 2, dict(named.options))

    def __call__(self, *handed: Tensor) -> Tensor:  # [] float64, on the device of the computation
        try:
            value = call(self.function, *handed, options=self.options)
        except ValueError as error:
            where = place_of_error(error) or place_of_error(error.__cause__ or error)
            if not where:
                raise
            raise ValueError(f"metric {self.name!r}, {where}: fix it there") from error
        try:
            return torch.as_tensor(value, dtype=torch.float64).detach().reshape(())
        except (TypeError, ValueError, RuntimeError) as error:
            given = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"metric {self.name!r}, {place_of(self.function)}, gave {shortened(given, 80)}: "
                "let it return one number"
            ) from error


def chosen(experiment: Experiment) -> list[Metric]:
    return [Metric.of(named) for named in experiment.evaluate.metrics]


EACH = 4  # examples per class on which metrics are tried


def try_out(metrics: Sequence[Metric], logits: Tensor, num_classes: int) -> None:
    """Call metrics before training, on synthetic outputs of the dtype and width of `logits`."""
    count, outputs = EACH * num_classes, logits.shape[1]
    numbers = torch.arange(count * outputs, device=logits.device).sin().to(logits.dtype)
    made_up = numbers.view(count, outputs)
    labels = torch.arange(count, device=logits.device) % num_classes
    from_counts(metrics, Tally.of(made_up, labels, num_classes).confusion.cpu())
    from_logits(metrics, made_up, labels)


def from_counts(metrics: Sequence[Metric], counts: Tensor) -> dict[str, float]:
    """The values of the metrics that read counts [L, L + 1]."""
    return {one.name: float(one(counts)) for one in metrics if not one.reads_logits}


def from_logits(metrics: Sequence[Metric], logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The values of the metrics that read logits. Only user-defined ones may synchronise."""
    with torch.no_grad():
        return {one.name: one(logits, labels) for one in metrics if one.reads_logits}


def balanced_accuracy(counts: Tensor) -> Tensor:
    """The mean recall of the classes that have examples."""
    counts = counts.double()
    sizes = counts.sum(1)
    return (counts.diagonal()[sizes > 0] / sizes[sizes > 0]).mean()


def kappa(counts: Tensor) -> Tensor:
    """Cohen's kappa: agreement with the labels beyond what chance gives."""
    counts = counts.double()
    total = counts.sum()
    chance = (counts.sum(1) * counts.sum(0)[:-1]).sum() / total**2
    return (counts.diagonal().sum() / total - chance) / (1 - chance)


def auroc(logits: Tensor, labels: Tensor) -> Tensor:
    """The area under the ROC curve, one class against the rest, averaged over classes.

    A class is ranked by its probability. One that has no examples, or all, is left out. With two
    classes both have the same area, so it is that of the second.
    """
    scores = logits.double().log_softmax(1)
    areas = []
    for label in range(scores.shape[1]):
        score, positive = scores[:, label].contiguous(), labels == label
        ordered = score.sort().values
        # Equal scores share their mean rank.
        below, upto = (torch.searchsorted(ordered, score, right=right) for right in (False, True))
        rank = (below + upto + 1).double() / 2
        num = positive.sum().double()
        above = (rank * positive).sum() - num * (num + 1) / 2
        areas.append(above / (num * (len(labels) - num)))  # 0 / 0 if it has none or all: left out
    return torch.stack(areas).nanmean()


def ece(logits: Tensor, labels: Tensor, *, bins: int = BINS) -> Tensor:
    """Expected calibration error: how far confidence is from accuracy, over bins of confidence.

    Args:
        bins: how many, of equal width; the confidence is the largest probability.
    """
    count, confidence, hits = reliability(logits, labels, bins).unbind()
    return (confidence - hits).abs().sum() / count.sum()


def reliability(logits: Tensor, labels: Tensor, bins: int) -> Tensor:  # [3, bins] float64
    """By bin of confidence: number of examples, sum of confidences, number of correct ones."""
    if bins < 1:
        raise ValueError(f"metric 'ece': bins is {bins}: choose 1 or more")
    confidence, predicted = logits.double().softmax(1).max(1)
    right = (predicted == labels).double()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1  # (0, 1 / bins], ...
    values = torch.stack([torch.ones_like(right), confidence, right])
    return values.new_zeros(3, bins).index_add(1, place, values)
