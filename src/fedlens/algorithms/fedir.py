"""FedIR (Hsu, Qi and Brown, ECCV 2020, arXiv:2003.08082), equations 3 and 4: importance weights.

An example of label y at client k has the weight w = p(y) / q_k(y), and a batch's loss is the mean
weighted by w. So each client minimises, in expectation, the loss on the label distribution p of the
population. With a power below 1, which is ours, w is (p / q)^power. The server sends p to the
clients. If p is given, clients never disclose q_k; without it, they disclose their label counts,
from which p is computed. With q_k = p it is FedAvg.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.slots import ExampleWeight, Tell
from fedlens.core import Batch, Gathered, Local, Memory, Tree
from fedlens.core.federation import Federation


@dataclass(frozen=True)
class LabelWeight(ExampleWeight):
    """p(y) / q_k(y) to a power. A label that the client does not hold weighs 0: it never occurs."""

    power: float
    reads_model: ClassVar[bool] = False

    def __call__(self, batch: Batch, local: Local) -> Tensor:  # [C, B]
        p = local.told["labels"]["p"]  # [1, L]
        counts = local.facts.label_counts.to(p)
        q = counts / counts.sum(1, keepdim=True).clamp(min=1)
        weight = torch.where(q > 0, p / q.clamp(min=1e-300), 0)
        if self.power != 1:
            weight = weight**self.power
        return weight.gather(1, batch.labels).to(batch.mask)


@dataclass(frozen=True)
class TellLabels(Tell):
    """p as given, else the share of each label in all examples held at the start."""

    p: tuple[float, ...] | None
    reads_cohort: ClassVar[bool] = False

    def init(self, params: Tree, federation: Federation) -> Memory:
        if self.p is None:
            counts = [federation.label_counts(some).sum(0) for some in federation.parts(0)]
            p = torch.stack(counts).sum(0).double()
        elif len(self.p) == federation.num_classes:
            p = torch.tensor(self.p, dtype=torch.float64)
        else:
            count = federation.num_classes
            raise ValueError(
                f"fedir: p has {len(self.p)} shares: give one for each of {count} labels"
            )
        device = next(iter(params.values())).device
        return {"labels": {"p": (p / p.sum()).to(device)}}

    def update(self, told: Memory, gathered: Gathered) -> Memory:
        return {}


@paper
def fedir(base: Algorithm, p: tuple[float, ...] | None = None, power: float = 1.0) -> Algorithm:
    """Make each client's labels look, in expectation, like everybody's.

    Args:
        p: the share of each label in the population; without it, the federation's own.
        power: weights are p / q to this power; below 1 they differ less, and 0 makes it FedAvg.
    """
    at_least(power, 0, "fedir: power")
    if p is not None and (min(p, default=-1) < 0 or sum(p) <= 0):
        raise ValueError(f"fedir: p is {list(p)}: give shares of 0 or more, not all 0")
    return replace(
        base,
        objective=base.objective.times(LabelWeight(power)),
        tell=(*base.tell, TellLabels(p)),
        discloses=base.discloses | ({"label_counts"} if p is None else set()),
    )
