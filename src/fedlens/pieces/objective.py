"""objective: what a client minimises."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from fedlens.core import Batch, Local
from fedlens.network.ops import mean_cross_entropy, weighted_mean
from fedlens.slots import ExampleWeight, Penalty

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits [C, B, L], labels [C, B]) -> the loss of each example [C, B]."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:  # [C, B, L], [C, B] -> [C, B]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


def double_softmax(logits: Tensor, labels: Tensor) -> Tensor:  # [C, B, L], [C, B] -> [C, B]
    """Cross-entropy of probabilities taken for logits: a softmax layer under a loss that has one.

    A common mistake, and paper 4's. It bounds the gradient: with ten classes the loss lies
    between ln(1 + 9 / e) = 1.4612 and 2.4612, and a saturated net gets no gradient back.
    """
    return cross_entropy(logits.softmax(-1), labels)


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:  # [C, B, L], [C, B] -> [C, B]
    """Half the squared distance to the label as a unit vector: least squares for `linear`."""
    wanted = F.one_hot(labels, logits.shape[-1]).to(logits)
    return (logits - wanted).square().sum(-1) / 2


@dataclass(frozen=True)
class PenaltyBy(Penalty):
    """A plain function as a penalty, of which nothing more is known."""

    function: Callable[[Local], Tensor]

    def __call__(self, local: Local) -> Tensor:  # [C]
        return self.function(local)


@dataclass(frozen=True)
class WeightBy(ExampleWeight):
    """A plain function as a weight of examples, of which nothing more is known."""

    function: Callable[[Batch, Local], Tensor]

    def __call__(self, batch: Batch, local: Local) -> Tensor:  # [C, B]
        return self.function(batch, local)


@dataclass(frozen=True)
class Objective:
    """The weighted mean of the examples' losses, plus penalties: weights multiply, terms add."""

    loss: Loss = cross_entropy
    weights: tuple[ExampleWeight, ...] = ()
    penalties: tuple[Penalty, ...] = ()

    def times(self, weight: Callable[[Batch, Local], Tensor]) -> "Objective":
        own = weight if isinstance(weight, ExampleWeight) else WeightBy(weight)
        return replace(self, weights=(*self.weights, own))

    def plus(self, penalty: Callable[[Local], Tensor]) -> "Objective":
        own = penalty if isinstance(penalty, Penalty) else PenaltyBy(penalty)
        return replace(self, penalties=(*self.penalties, own))

    def __call__(self, logits: Tensor, batch: Batch, local: Local) -> tuple[Tensor, Tensor]:
        """What is differentiated, and the loss alone without penalties; both [C]."""
        weight = batch.mask
        for factor in self.weights:
            weight = weight * factor(batch, local)
        loss = whole = _mean(self.loss, logits, batch.labels, weight)
        for penalty in self.penalties:
            whole = whole + penalty(local)
        return whole, loss.detach()


def _mean(loss: Loss, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:  # [C]
    """The weighted mean of a client's losses."""
    if loss is cross_entropy:
        return mean_cross_entropy(logits, labels, weight)
    return weighted_mean(loss(logits.to(weight), labels), weight)
