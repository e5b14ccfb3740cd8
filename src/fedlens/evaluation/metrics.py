"""Measures of a model: counted on the device batch by batch, read once at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core.federation import Holdings


@dataclass(frozen=True)
class Tally:
    """Counts of a model's predictions on some examples. Tallies of batches are added with +."""

    confusion: Tensor  # [L, L + 1] int64: true label, prediction; the last column is "no label"
    top5: Tensor  # [] int64: how often the label was among the five largest logits
    loss: Tensor  # [] float64, summed

    @classmethod
    def zero(cls, num_classes: int, device: torch.device) -> Tally:
        """The tally of no examples."""
        count = torch.zeros(num_classes, num_classes + 1, dtype=torch.int64, device=device)
        return cls(count, count.new_zeros(()), count.new_zeros((), dtype=torch.float64))

    @classmethod
    def of(
        cls, logits: Tensor, labels: Tensor, num_classes: int, losses: Tensor | None = None
    ) -> Tally:
        """The tally of logits [..., outputs] for labels [...], without device synchronisation.

        A model may have more outputs than there are classes: predicting an extra one is wrong.
        `losses` [...], one per example, are cross-entropies by default.
        """
        outputs = logits.shape[-1]
        if outputs < num_classes:
            raise ValueError(
                f"a model with {outputs} outputs cannot tell {num_classes} classes apart: "
                f"give it {num_classes} outputs"
            )
        logits = logits.detach().reshape(-1, outputs)
        labels = labels.reshape(-1)
        if losses is None:
            wide = torch.promote_types(logits.dtype, torch.float32)
            losses = F.cross_entropy(logits.to(wide), labels, reduction="none")
        best = logits.topk(min(5, num_classes), dim=1).indices
        predicted = logits.argmax(1).clamp(max=num_classes)
        zero = cls.zero(num_classes, logits.device)
        cell = labels * (num_classes + 1) + predicted
        counts = zero.confusion.view(-1).index_add(0, cell, torch.ones_like(cell))
        return cls(
            counts.view_as(zero.confusion),
            (best == labels[:, None]).sum(),
            losses.detach().sum(dtype=torch.float64),
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.confusion + other.confusion, self.top5 + other.top5, self.loss + other.loss
        )


def metrics(tally: Tally) -> dict[str, float]:
    """Loss, accuracy, top-5 accuracy, macro precision, recall and F1, and classes predicted.

    Macro averages are over the classes that occur among the labels or the predictions, as in
    scikit-learn; a class that was never predicted has precision 0, one without examples recall 0.
    """
    confusion = tally.confusion.cpu().to(torch.float64)
    count = confusion.sum()
    if count == 0:
        raise ValueError("no examples to measure on: give the test set at least one")
    hits = confusion.diagonal()
    labelled, predicted = confusion.sum(1), confusion.sum(0)[:-1]
    occurs = labelled + predicted > 0

    def macro(part: Tensor, whole: Tensor) -> float:
        return float((part / whole.clamp(min=1))[occurs].mean())

    return {
        "loss": float(tally.loss.cpu() / count),
        "accuracy": float(hits.sum() / count),
        "top5": float(tally.top5.cpu() / count),
        "precision": macro(hits, predicted),
        "recall": macro(hits, labelled),
        "f1": macro(2 * hits, labelled + predicted),
        "classes_predicted": int((predicted > 0).sum()),
    }


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


def spread(accuracy: Tensor) -> dict[str, float]:  # [K]
    """How accuracy is spread over clients: mean, std, quantiles, worst decile and Jain's index.

    Clients without examples (NaN) are left out; if there are no others, the result is empty. The
    worst decile is the mean of the worst tenth of clients, at least of one. Jain's index is
    (sum a)^2 / (K sum a^2): 1 if all clients are equal, 1 / K if only one has a non-zero accuracy.
    """
    accuracy = accuracy[~accuracy.isnan()]
    if len(accuracy) == 0:
        return {}
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
    }
