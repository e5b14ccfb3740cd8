"""The loss functions that `loss` may name, computed example by example.

Options of type `Number` may differ between experiments that train side by side.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import torch.nn.functional as F
from torch import Tensor

from fedlens.config.options import Bounds, options_of
from fedlens.core import Number, is_on, per_row
from fedlens.core.label_sets import unpacked

Share = Annotated[Number, Bounds(least=0, most=1)]
Positive = Annotated[Number, Bounds(least=0)]

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits [C, B, L], labels [C, B]) -> the loss of each example [C, B]."""


def cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: Share = 0.0) -> Tensor:
    """Cross-entropy; as torch's, with labels that are smoothed if asked for.

    Args:
        label_smoothing: the share of a label that is spread evenly over all classes.
    """
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.view(labels.shape)
    if not is_on(label_smoothing):
        return losses
    share = per_row(label_smoothing, losses)
    return (1 - share) * losses - share * logits.log_softmax(-1).mean(-1)


def focal(logits: Tensor, labels: Tensor, *, gamma: Positive = 2.0) -> Tensor:
    """Focal loss (Lin et al., ICCV 2017, arXiv:1708.02002): (1 - p)^gamma times cross-entropy.

    p is the probability of the right class, so what is learnt already counts less. Their alpha,
    a weight for each class, is left to `local.class_balance`.

    Args:
        gamma: how much less; 0 is cross-entropy.
    """
    losses = cross_entropy(logits, labels)
    # Above 0, where a power below 1 has no finite gradient.
    wrong = (-(-losses).expm1()).clamp(min=1e-12)
    return wrong ** per_row(gamma, losses) * losses


def double_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of probabilities taken for logits: a softmax layer under a loss that has one.

    A common mistake, and paper 4's. It bounds the gradient: with ten classes the loss lies
    between ln(1 + 9 / e) = 1.4612 and 2.4612, and a saturated net gets no gradient back.
    """
    return cross_entropy(logits.softmax(-1), labels)


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Half the squared distance to the label as a unit vector: least squares for `linear`."""
    wanted = F.one_hot(labels, logits.shape[-1]).to(logits)
    return (logits - wanted).square().sum(-1) / 2


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, *, positive_weight: Positive = 1.0
) -> Tensor:
    """For images with several labels each: cross-entropy of each label by itself, the mean of all.

    The probability of a label is the sigmoid of its logit; `labels` are `label_sets`.

    Args:
        positive_weight: how often a label counts that an image has, against one that it has not.
    """
    wanted = unpacked(labels, logits.shape[-1]).to(logits)
    losses = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return (losses * (1 + (per_row(positive_weight, losses) - 1) * wanted)).mean(-1)


@dataclass(frozen=True)
class NumberOption:
    name: str
    value: Number


@dataclass(frozen=True)
class LossWith:
    """A loss with its options; the numbers may differ between experiments."""

    function: Callable[..., Tensor]
    numbers: tuple[NumberOption, ...] = ()
    others: tuple[tuple[str, Any], ...] = ()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:  # [C, B]
        numbers = {option.name: option.value for option in self.numbers}
        return self.function(logits, labels, **numbers, **dict(self.others))


def with_options(function: Callable[..., Tensor], options: Mapping[str, Any]) -> Loss:
    """A loss with these options, named as in an experiment; `function` if all are its defaults."""
    known = options_of(function)
    if all(value == known[name].default for name, value in options.items()):
        return function
    numbers, others = [], []
    for name, value in options.items():
        option = known[name]
        if Number in (option.annotation, *get_args(option.annotation)):
            numbers.append(NumberOption(option.name, value))
        else:
            others.append((option.name, value))
    return LossWith(function, tuple(numbers), tuple(others))
