"""Measures of a model: counted on the device batch by batch, read once at the end.

`metrics` gives those of every evaluation; `evaluate.metrics` may name more, as functions. One with
one argument receives the counts [L, L + 1]: true label, prediction; the last column is "no label".
One with two arguments receives the logits [N, outputs] and labels [N] of all examples, on the
device of the evaluation. Both return one number, as a float or a tensor.

Where images may have several labels, labels are [N, L] instead: 1 for each label of an image, and 0
for the others. Logits above 0 then say that an image has a label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.config.consent import place_of, place_of_error
from fedlens.config.experiment import Experiment, Named
from fedlens.config.names import METRICS
from fedlens.config.options import call
from fedlens.config.sections import Count
from fedlens.core.federation import Holdings
from fedlens.storage.reading import shortened

RANKS = "auroc", "average_precision"  # always measured where images may have several labels
BINS = 15  # bins of confidence, for `ece`
EACH = 4  # examples per class on which metrics are tried


@dataclass(frozen=True)
class Tally:
    """Counts of a model's predictions on some examples. Tallies of batches are added with +."""

    confusion: Tensor
    """[L, L + 1] int64: true label, prediction; the last column is "no label". Of several labels an
    image [L, 2, 2]: for each whether images have it, and whether the model says so."""
    right: Tensor  # [] int64: how often the prediction was right, for all labels of an image
    top5: Tensor  # [] int64: how often the label was among the five largest logits
    loss: Tensor  # [] float64, summed

    @classmethod
    def of(
        cls, logits: Tensor, labels: Tensor, num_classes: int, losses: Tensor | None = None
    ) -> Tally:
        """The tally of logits [N, outputs] for labels [N] or [N, L], without synchronisation.

        A model may have more outputs than there are classes: predicting an extra one is wrong.
        `losses` [N] are cross-entropies by default.
        """
        outputs = logits.shape[-1]
        if outputs < num_classes:
            raise ValueError(
                f"a model with {outputs} outputs cannot tell {num_classes} classes apart: "
                f"give it {num_classes} outputs"
            )
        logits = logits.detach()
        right = is_right(logits, labels).sum()
        if losses is None:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if labels.ndim == 1:
                losses = F.cross_entropy(wide, labels, reduction="none")
            else:
                wanted = labels.to(wide)
                losses = F.binary_cross_entropy_with_logits(wide, wanted, reduction="none").mean(1)
        loss = losses.detach().sum(dtype=torch.float64)
        if labels.ndim == 2:
            cell = 4 * torch.arange(num_classes, device=logits.device) + 2 * labels + (logits > 0)
            return cls(_counts(cell, num_classes, 2, 2), right, torch.zeros_like(right), loss)
        best = logits.topk(min(5, num_classes), dim=1).indices
        predicted = logits.argmax(1).clamp(max=num_classes)
        counts = _counts(labels * (num_classes + 1) + predicted, num_classes, num_classes + 1)
        return cls(counts, right, (best == labels[:, None]).sum(), loss)

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def by_label(self) -> tuple[Tensor, Tensor, Tensor]:  # [L] each, float64
        """How often a label was found where it is, how often it is there, and how often found."""
        counts = self.confusion.cpu().to(torch.float64)
        if counts.ndim == 3:
            return counts[:, 1, 1], counts[:, 1].sum(1), counts[:, :, 1].sum(1)
        return counts.diagonal(), counts.sum(1), counts.sum(0)[:-1]


def _counts(cells: Tensor, *shape: int) -> Tensor:
    """How often each cell of a table is named."""
    cells, zero = cells.flatten(), cells.new_zeros(shape)
    return zero.view(-1).index_add(0, cells, torch.ones_like(cells)).view(shape)


def is_right(logits: Tensor, labels: Tensor) -> Tensor:  # [N, outputs], [N] or [N, L] -> [N] bool
    """Whether a model is right about an image: about each of its labels, if it may have several."""
    return logits.argmax(1) == labels if labels.ndim == 1 else ((logits > 0) == labels).all(1)


def metrics(tally: Tally) -> dict[str, float]:
    """Loss, accuracy, top-5 accuracy, macro precision, recall and F1, and classes predicted.

    Where images may have several labels, accuracy is the share of images of which all labels are
    right, and there is no top-5 accuracy. Macro averages are over the classes that occur among the
    labels or the predictions, as in scikit-learn; a class that was never predicted has precision 0,
    one without examples recall 0.
    """
    several = tally.confusion.ndim == 3
    count = tally.confusion[0].sum() if several else tally.confusion.sum()
    if count == 0:
        raise ValueError("no examples to measure on: give the test set at least one")
    hits, labelled, predicted = tally.by_label
    occurs = labelled + predicted > 0

    def macro(part: Tensor, whole: Tensor) -> float:
        return float((part / whole.clamp(min=1))[occurs].mean())

    return {
        "loss": float(tally.loss / count),
        "accuracy": float(tally.right.double() / count),
        **({} if several else {"top5": float(tally.top5.double() / count)}),
        "precision": macro(hits, predicted),
        "recall": macro(hits, labelled),
        "f1": macro(2 * hits, labelled + predicted),
        "classes_predicted": int((predicted > 0).sum()),
    }


def of_labels(
    tally: Tally, from_logits: dict[str, Tensor], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """How many images have each label, and how well it is found; NaN if that is unknown."""
    hits, labelled, predicted = tally.by_label
    found = {"images": labelled.long(), "f1": 2 * hits / (labelled + predicted)}
    found |= {name: value for name, value in from_logits.items() if value.ndim}
    rows = zip(*(value.tolist() for value in found.values()), strict=True)
    return {name: dict(zip(found, row, strict=True)) for name, row in zip(names, rows, strict=True)}


def accuracy_by_client(correct: Tensor, holdings: Holdings) -> Tensor:  # [n] -> [K] float64
    """The accuracy of each client; NaN for a client without examples.

    `correct` says for each entry of `holdings.index` whether it was classified correctly.
    """
    if len(correct) != len(holdings.index):
        raise ValueError(
            f"{len(correct)} answers for {len(holdings.index)} examples held: give one for each"
        )
    hits = torch.zeros(len(holdings), dtype=torch.float64)
    hits = hits.index_add(0, holdings.owners, correct.cpu().to(torch.float64))
    return hits / holdings.sizes


def spread(accuracy: Tensor, tested: Tensor | None = None) -> dict[str, float]:  # [K] both
    """How accuracy is spread over clients: mean, std, quantiles, worst decile and Jain's index.

    Clients without examples (NaN) are left out; if there are no others, the result is empty. The
    worst decile is the mean of the worst tenth of clients, at least of one. Jain's index is
    (sum a)^2 / (K sum a^2): 1 if all clients are equal, 1 / K if only one has a non-zero accuracy.
    Given how many examples each was tested on, the weighted mean counts all examples alike.
    """
    known = ~accuracy.isnan()
    accuracy = accuracy[known]
    if len(accuracy) == 0:
        return {}
    weights = None if tested is None else tested.to(accuracy)[known]
    mean, squares = accuracy.mean(), accuracy.square().mean()
    p10, median = accuracy.quantile(torch.tensor([0.1, 0.5], dtype=torch.float64))
    return {
        "mean": float(mean),
        "std": float(accuracy.std(correction=0)),
        "min": float(accuracy.min()),
        "p10": float(p10),
        "median": float(median),
        "max": float(accuracy.max()),
        "worst_decile": float(accuracy.sort().values[: max(len(accuracy) // 10, 1)].mean()),
        "jain": float(mean.square() / squares) if squares > 0 else 1.0,  # all are 0, so equal
        **({} if weights is None else {"weighted": float(accuracy @ weights / weights.sum())}),
    }


@dataclass(frozen=True)
class Metric:
    name: str  # in records it follows the name of the part
    function: Callable[..., Any]
    reads_logits: bool
    options: dict[str, Any]

    @classmethod
    def of(cls, named: Named) -> Metric:
        function = METRICS.find(named.name)
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


def try_out(
    metrics: Sequence[Metric], logits: Tensor, num_classes: int, several: bool = False
) -> None:
    """Call metrics before training, on synthetic outputs of the dtype and width of `logits`."""
    count, outputs = EACH * num_classes, logits.shape[1]
    numbers = torch.arange(count * outputs, device=logits.device).sin().to(logits.dtype)
    made_up = numbers.view(count, outputs)
    labels = torch.arange(count, device=logits.device) % num_classes
    labels = F.one_hot(labels, num_classes) if several else labels
    from_counts(metrics, Tally.of(made_up, labels, num_classes))
    from_logits(metrics, made_up, labels)


def from_counts(metrics: Sequence[Metric], tally: Tally) -> dict[str, float]:
    """The values of the metrics that read counts [L, L + 1]."""
    counts = tally.confusion.cpu()
    return {one.name: float(one(counts)) for one in metrics if not one.reads_logits}


def from_logits(metrics: Sequence[Metric], logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The values of the metrics that read logits. Only user-defined ones may synchronise.

    Where images may have several labels, two more are always there, with a value for each: [L].
    """
    with torch.no_grad():
        found = {one.name: one(logits, labels) for one in metrics if one.reads_logits}
        if labels.ndim == 2:
            found |= zip(RANKS, _ranks(logits, labels), strict=True)
        return found


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
    return _ranks_of_classes(logits, labels)[0]


def average_precision(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean precision at the examples of a class, ranked by its probability, over classes.

    That is mAP: precision at an example is the share of the class among those ranked as high as it
    or higher. A class without examples is left out.
    """
    return _ranks_of_classes(logits, labels)[1]


def _ranks_of_classes(logits: Tensor, labels: Tensor) -> Tensor:  # [2], of `_ranks`
    """One class after the other: there may be many."""
    scores = logits.double().log_softmax(1)
    each = [_ranks(scores[:, [k]], (labels == k)[:, None]) for k in range(scores.shape[1])]
    return torch.cat(each, 1).nanmean(1)


def _ranks(scores: Tensor, labels: Tensor) -> Tensor:  # [N, L] both -> [2, L] float64
    """The AUROC and the average precision of each label; NaN where there is none."""
    score, positive = (t.T.contiguous() for t in (scores.double(), labels.bool()))
    count, num = len(labels), positive.sum(1).double()
    ordered, own = (t.sort().values for t in (score, score.where(positive, -torch.inf)))
    # Equal scores share their mean rank.
    below, upto = (torch.searchsorted(ordered, score, right=right) for right in (False, True))
    rank = (below + upto + 1).double() / 2
    area = ((rank * positive).sum(1) - num * (num + 1) / 2) / (num * (count - num))
    precision = (count - torch.searchsorted(own, score)).double() / (count - below)
    return torch.stack([area, precision.where(positive, 0.0).sum(1) / num])


def ece(logits: Tensor, labels: Tensor, *, bins: Count = BINS) -> Tensor:
    """Expected calibration error: how far confidence is from accuracy, over bins of confidence.

    Args:
        bins: how many, of equal width; the confidence is the largest probability.
    """
    count, confidence, hits = reliability(logits, labels, bins).unbind()
    return (confidence - hits).abs().sum() / count.sum()


def reliability(logits: Tensor, labels: Tensor, bins: int) -> Tensor:  # [3, bins] float64
    """By bin of confidence: number of examples, sum of confidences, number of correct ones."""
    confidence, predicted = logits.double().softmax(1).max(1)
    right = (predicted == labels).double()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1  # (0, 1 / bins], ...
    values = torch.stack([torch.ones_like(right), confidence, right])
    return values.new_zeros(3, bins).index_add(1, place, values)
