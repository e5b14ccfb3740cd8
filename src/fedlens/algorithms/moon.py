"""MOON (Li et al., CVPR 2021, arXiv:2103.16257): features stay near those of the server's model.

A client adds mu times a contrastive loss, the mean over its batch of
    -log(exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau))),
where z are the features of an image by the model in training, z_glob by the server's model, z_prev
by the client's own model after its last round, and sim is the cosine. Features are the inputs of
the last linear layer; the paper puts two more layers before it. All models run as in training. The
model is one for all. With mu = 0 it is FedAvg.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.slots import Penalty, Uploading
from fedlens.core import Local, Memory, Number, Tree, Upload, per_row
from fedlens.network.ops import weighted_mean

PREVIOUS = "previous"  # the client's model after its last round


@dataclass(frozen=True)
class Contrast(Penalty):
    mu: Number
    tau: Number
    reads_features: ClassVar[bool] = True

    def __call__(self, local: Local) -> Tensor:  # [C]
        assert local.features_of and local.features is not None and local.batch is not None
        z = local.features.flatten(2)
        to_server, to_own = (
            F.cosine_similarity(z, local.features_of(model).flatten(2), dim=2)
            for model in (local.anchor, local.memory[PREVIOUS])
        )  # [C, B]
        losses = F.softplus((to_own - to_server) / per_row(self.tau, z[..., 0]))
        return self.mu * weighted_mean(losses.to(local.batch.mask), local.batch.mask)


@dataclass(frozen=True)
class KeepModel:
    upload: Uploading

    def __call__(self, local: Local) -> Upload:
        sent = self.upload(local)
        return replace(sent, keep={**sent.keep, PREVIOUS: dict(local.params)})


def servers_model(params: Tree, told: Memory) -> Tree:
    """What a client that never took part has for its last model."""
    return dict(params)


@paper
def moon(base: Algorithm, mu: Number = 1.0, tau: Number = 0.5) -> Algorithm:
    """Hold clients' features near those of the server's model.

    Args:
        mu: how much that counts; 0 is FedAvg.
        tau: the temperature of the contrastive loss.
    """
    at_least(mu, 0, "moon: mu")
    at_least(tau, 1e-6, "moon: tau")
    return replace(
        base,
        objective=base.objective.plus(Contrast(mu, tau)),
        upload=KeepModel(base.upload),
        memory={**base.memory, PREVIOUS: servers_model},
    )
