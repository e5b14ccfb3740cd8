"""FedProto (Tan et al., AAAI 2022, arXiv:2105.00243): class prototypes go up, and models stay.

The prototype of class j at client k is the mean of the features of its images of that class, here
the inputs of the last linear layer, in the last local epoch. The server takes the mean of the
clients' by their numbers of images, and keeps that of a class that no client of a round holds. A
client adds lambda times the mean over its batch of the squared distance (a mean over features) of
an image's features from the prototype of its class, if there is one. Models are each client's own,
and a client is measured by its own; the authors measure by the nearest prototype, too. With lambda
= 0 each client trains alone. Prototypes are means of features, without noise: they tell of images,
and with them go the numbers of images of each class.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import OwnModel, epochs_of
from fedlens.algorithm.pieces.personal import head_of
from fedlens.algorithm.slots import Penalty, Solve, Tell, Uploading, Wraps
from fedlens.core import Gathered, Local, Memory, Moved, Number, Tree, Upload, per_row
from fedlens.core.federation import Federation
from fedlens.network.ops import weighted_mean

PROTOTYPES = "prototypes"


def sums_of(params: Tree, axes: int) -> Tree:
    """Sums of the features of each class, and how many there are, at zero."""
    names = head_of(params, None, axes)
    weight = params[names[0]] if names else next(iter(params.values()))
    shape = weight.shape[: axes + 1]
    return {"sums": weight.new_zeros(weight.shape), "counts": weight.new_zeros(shape)}


@dataclass(frozen=True)
class NearPrototypes(Penalty):
    lambda_: Number
    reads_features: ClassVar[bool] = True

    def __call__(self, local: Local) -> Tensor:  # [C]
        assert local.features is not None and local.batch is not None
        labels, mask, told = local.batch.labels, local.batch.mask, local.told[PROTOTYPES]
        z = local.features.flatten(2).to(mask)  # [C, B, d]
        row = torch.arange(len(told["sums"]), device=labels.device)[:, None]
        counts = told["counts"][row, labels]  # [C, B]
        means = told["sums"][row, labels] / counts.clamp(min=1)[..., None]
        away = (z - means).square().mean(2) * (counts > 0)
        return self.lambda_ * weighted_mean(away, mask)


@dataclass(frozen=True)
class Summed(Wraps):
    """`inner`, with the sums of features of the client's last epoch."""

    inner: Solve
    epochs: int

    def init(self, params: Tree) -> Memory:
        return {**self.inner.init(params), PROTOTYPES: sums_of(params, axes=1)}

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        assert local.features is not None and local.batch is not None and local.step is not None
        found, mask = memory[PROTOTYPES], local.batch.mask
        begins = local.step % (local.steps // self.epochs).clamp(min=1) == 0  # [C] an epoch
        of_class = F.one_hot(local.batch.labels, found["counts"].shape[1]).to(mask)
        of_class = of_class * mask[..., None]  # [C, B, L]
        more = {
            "sums": of_class.mT @ local.features.detach().flatten(2).to(mask),
            "counts": of_class.sum(1),
        }
        added = {n: t * per_row(~begins, t) + more[n] for n, t in found.items()}
        solver = {name: tree for name, tree in memory.items() if name != PROTOTYPES}
        params, solver = self.inner.update(grads, solver, params, local)
        return params, {**solver, PROTOTYPES: added}


@dataclass(frozen=True)
class SendPrototypes:
    upload: Uploading

    def __call__(self, local: Local) -> Upload:
        return replace(self.upload(local), extra={PROTOTYPES: dict(local.solver[PROTOTYPES])})


@dataclass(frozen=True)
class TellPrototypes(Tell):
    def init(self, params: Tree, federation: Federation) -> Memory:
        return {PROTOTYPES: sums_of(params, axes=0)}

    def update(self, told: Memory, gathered: Gathered) -> Memory:
        before, new = told[PROTOTYPES], gathered.extra[PROTOTYPES]
        seen = new["counts"] > 0
        return {
            PROTOTYPES: {
                "sums": torch.where(seen[:, None], new["sums"], before["sums"]),
                "counts": torch.where(seen, new["counts"], before["counts"]),
            }
        }


@paper
def fedproto(base: Algorithm, lambda_: Number = 1.0) -> Algorithm:
    """Let clients share the mean features of each class, and nothing of their models.

    Args:
        lambda_: how much the distance from these counts (lambda, called `lambda` in an experiment
            file).
    """
    at_least(lambda_, 0, "fedproto: lambda")
    draw = epochs_of(base.draw, "fedproto")
    return replace(
        base,
        draw=replace(draw, whole=True),
        objective=base.objective.plus(NearPrototypes(lambda_)),
        solve=Summed(base.solve, draw.count),
        upload=SendPrototypes(base.upload),
        personal=OwnModel(
            sends="sets of prototypes, the mean features of its images of each class"
        ),
        tell=(*base.tell, TellPrototypes()),
        discloses=base.discloses | {"label_counts"},
    )
