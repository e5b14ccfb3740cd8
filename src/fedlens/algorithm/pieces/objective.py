"""objective: what a client minimises."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm.pieces.losses import Loss, cross_entropy
from fedlens.algorithm.pieces.per_example import PerExample
from fedlens.algorithm.slots import ExampleWeight, Penalty
from fedlens.config.consent import place_of
from fedlens.core import Batch, Local, Number, per_row
from fedlens.network.ops import mean_cross_entropy, weighted_mean


@dataclass(frozen=True)
class PenaltyBy(Penalty):
    """A penalty that is a plain function, so that nothing more is known about it."""

    function: Callable[[Local], Tensor]

    def __call__(self, local: Local) -> Tensor:  # [C]
        return self.function(local)


@dataclass(frozen=True)
class WeightBy(ExampleWeight):
    """A weight of examples that is a plain function: nothing more is known about it."""

    function: Callable[[Batch, Local], Tensor]

    def __call__(self, batch: Batch, local: Local) -> Tensor:  # [C, B]
        return self.function(batch, local)


@dataclass(frozen=True)
class ByEffectiveNumber(ExampleWeight):
    """(1 - beta) / (1 - beta^n), where the client holds n examples of the label.

    That is one over the effective number of the class-balanced loss (Cui et al., CVPR 2019,
    arXiv:1901.05555, equation 2). Their n counts all training examples; here, those of the client.
    They scale weights to a mean of 1 over classes; here the loss of a batch is divided by the sum
    of its weights. With beta = 0 all examples count the same, with beta = 1 all classes: 1 / n.
    """

    beta: Number
    reads_model: ClassVar[bool] = False

    def __call__(self, batch: Batch, local: Local) -> Tensor:  # [C, B]
        held = local.facts.label_counts.clamp(min=1).double()  # [C, L]
        beta = torch.zeros_like(held) + per_row(self.beta, held)
        weight = torch.where(beta < 1, (1 - beta) / (1 - beta**held), 1 / held)
        return weight.gather(1, batch.labels).to(batch.mask)


@dataclass(frozen=True)
class Objective:
    """The weighted mean of the examples' losses, plus penalties: weights multiply, terms add.

    With `private`, the gradient of the mean is another one, and examples have no weights.
    """

    loss: Loss = cross_entropy
    weights: tuple[ExampleWeight, ...] = ()
    penalties: tuple[Penalty, ...] = ()
    private: PerExample | None = None

    def times(self, weight: Callable[[Batch, Local], Tensor]) -> "Objective":
        own = weight if isinstance(weight, ExampleWeight) else WeightBy(weight)
        return replace(self, weights=(*self.weights, own))

    def plus(self, penalty: Callable[[Local], Tensor]) -> "Objective":
        own = penalty if isinstance(penalty, Penalty) else PenaltyBy(penalty)
        return replace(self, penalties=(*self.penalties, own))

    def __call__(self, logits: Tensor, batch: Batch, local: Local) -> tuple[Tensor, Tensor]:
        """The objective, which is differentiated, and the loss without penalties; both [C]."""
        weight = batch.mask
        for factor in self.weights:
            weight = weight * factor(batch, local)
        loss = _mean(self.loss, logits, batch.labels, weight)
        return self.penalised(loss, local), loss.detach()

    def penalised(self, loss: Tensor, local: Local) -> Tensor:  # [C]
        """A loss plus the penalties."""
        whole = loss
        for penalty in self.penalties:
            term = penalty(local)
            if term.shape != loss.shape:  # it would be broadcast to all clients
                found = f"gave a tensor {list(term.shape)}, and not {list(loss.shape)}"
                raise ValueError(f"{_place(penalty)} {found}: return a number for each client")
            whole = whole + term
        return whole


def _place(penalty: Penalty) -> str:
    return place_of(penalty.function if isinstance(penalty, PenaltyBy) else penalty)


def _mean(loss: Loss, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:  # [C]
    """The weighted mean of a client's losses."""
    if loss is cross_entropy:
        return mean_cross_entropy(logits, labels, weight)
    return weighted_mean(loss(logits.to(weight), labels), weight)
