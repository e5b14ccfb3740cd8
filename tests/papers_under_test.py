"""Every algorithm, alone and in the combinations of the papers' tables, and every augmentation."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.dp_sgd import protect_examples
from fedlens.algorithm.pieces import (
    ByEffectiveNumber,
    ClippedByNorm,
    ClippedByValue,
    Epochs,
    Objective,
    Sgd,
    Steps,
    Uniformly,
)
from fedlens.algorithm.pieces.losses import focal, with_options
from fedlens.algorithm.pieces.optimizers import Adam
from fedlens.algorithm.private import with_privacy
from fedlens.algorithm.slots import ExampleWeight, Solve, Wraps
from fedlens.algorithms.admm import admm, ceadmm, fedadmm
from fedlens.algorithms.apfl import apfl
from fedlens.algorithms.bucketing import bucketing
from fedlens.algorithms.bulyan import bulyan
from fedlens.algorithms.by_distance import caf, dnc, mda
from fedlens.algorithms.centred_clipping import centred_clipping
from fedlens.algorithms.clip import clip
from fedlens.algorithms.ditto import ditto
from fedlens.algorithms.eden import eden
from fedlens.algorithms.fedala import fedala
from fedlens.algorithms.fedasync import fedasync
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedavgm import fedavgm
from fedlens.algorithms.fedbuff import fedbuff
from fedlens.algorithms.fedcm import fedcm
from fedlens.algorithms.feddyn import feddyn
from fedlens.algorithms.fedir import fedir
from fedlens.algorithms.fednova import fednova
from fedlens.algorithms.fedns import fedns
from fedlens.algorithms.fedopt import fedadagrad, fedadam, fedyogi
from fedlens.algorithms.fedproto import fedproto
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.fedvc import fedvc
from fedlens.algorithms.fine_tune import fine_tune
from fedlens.algorithms.fltrust import fltrust
from fedlens.algorithms.geometric_median import geometric_median
from fedlens.algorithms.krum import krum
from fedlens.algorithms.lambda_sum import lambda_sum
from fedlens.algorithms.lastfc import lastfc
from fedlens.algorithms.liadmm import celiadmm, liadmm
from fedlens.algorithms.local_only import local_only
from fedlens.algorithms.meamed import meamed
from fedlens.algorithms.median import median
from fedlens.algorithms.moon import moon
from fedlens.algorithms.nnm import nnm
from fedlens.algorithms.norm_bound import norm_bound
from fedlens.algorithms.own_layers import fedbabu, fedbn, fedper, fedrep, lg_fedavg
from fedlens.algorithms.per_fedavg import per_fedavg
from fedlens.algorithms.pfedme import pfedme
from fedlens.algorithms.powersgd import powersgd
from fedlens.algorithms.qfedavg import qfedavg
from fedlens.algorithms.quantize import download, quantize
from fedlens.algorithms.scaffold import scaffold
from fedlens.algorithms.sign import sign
from fedlens.algorithms.sign_guard import sign_guard
from fedlens.algorithms.top_k import top_k
from fedlens.algorithms.trimmed_mean import trimmed_mean
from fedlens.core import Batch, Local, Memory, Number, Tree, keys, per_row
from fedlens.data.augment import Augment
from fedlens.privacy.mechanisms import Adaptive, BandedNoise, Gaussian
from fedlens.privacy.protection import Protection

BASE = Algorithm(
    select=Uniformly(5),
    draw=Epochs(2, batch_size=8),
    solve=Sgd(0.1, momentum=0.5, weight_decay=1e-3),
)


AUGMENTS = {
    "floats": Augment(1, True, 0.5, rotate=20, brightness=0.3, contrast=0.3, cutout=2, mixup=0.4),
    "bytes": Augment(saturation=0.5, rand_augment=2),
}
"""What may happen to images of floats, and to those of bytes."""


@dataclass(frozen=True)
class Noisy(Wraps):
    """`inner`, on gradients with noise that each client draws anew in every step."""

    inner: Solve
    sigma: Number

    def update(
        self, grads: Tree, memory: Memory, params: Tree, local: Local
    ) -> tuple[Tree, Memory]:
        key = local.key("noise")
        for number, g in enumerate(grads.values()):
            entry = torch.arange(g[0].numel(), device=g.device)
            noise = keys.normal(keys.fold(keys.fold(key, number)[:, None], entry))
            g.add_(noise.view(g.shape) * per_row(self.sigma, g))
        return self.inner.update(grads, memory, params, local)


@dataclass(frozen=True)
class ByChance(ExampleWeight):
    """Weights of examples that are drawn anew in every step."""

    reads_model: ClassVar[bool] = False

    def __call__(self, batch: Batch, local: Local) -> Tensor:  # [C, B]
        place = torch.arange(batch.labels.shape[1], device=batch.labels.device)
        drawn = keys.uniform(keys.fold(local.key("weights")[:, None], place))
        return (0.5 + drawn).to(batch.mask.dtype)


PLAIN = replace(BASE, solve=Sgd(0.1))
DECAYED = replace(BASE, solve=Sgd(0.1, weight_decay=1e-3))
ADAMW = Adam(0.01, weight_decay=0.1, decoupled=True, weight_decay_on="weights")
PROTECTION = Protection(
    noise=0.02,
    clip=Adaptive(quantile=0.5, start=0.3, lr=0.2, count_noise=0.1),
    mechanism=Gaussian(),
    sampling="poisson",
    rounds=20,
    clients=10,
    cohort=5,
    noise_cohort=5,
    population=10,
)
BANDED = replace(PROTECTION, clip=0.3, mechanism=BandedNoise(2), sampling="cyclic")
FOCAL = Objective(with_options(focal, {"gamma": 1.5})).times(ByEffectiveNumber(0.9))
ALGORITHMS = {
    "fedavg": BASE,
    "fedavg over the population": compose(BASE, fedavg(over="population")),
    "lambda-sum": compose(BASE, lambda_sum(0.2)),
    "fedprox": compose(BASE, fedprox(0.1)),
    "fedprox without momentum": compose(PLAIN, fedprox(0.1)),
    "fedprox by size, uneven": compose(BASE, fedprox(0.1, sampling="by-size", uneven=0.5)),
    "fedprox with inexactness": compose(BASE, fedprox(0.1, inexactness=True)),
    "fedavgm": compose(BASE, fedavgm(0.9)),
    "fedavgm, nesterov": compose(BASE, fedavgm(0.9, nesterov=True)),
    "fedir": compose(BASE, fedir()),
    "fedvc": compose(BASE, fedvc(size=16)),
    "fedvc x fedir x fedavgm": compose(BASE, fedvc(size=16), fedir(), fedavgm(0.9)),
    "lastfc": compose(BASE, lastfc()),
    "fedns": compose(BASE, fedns()),
    "liadmm": compose(PLAIN, liadmm(gamma=0.1)),
    "liadmm, trained": compose(BASE, liadmm(gamma=0.1, local="training", dual="epoch")),
    "liadmm, sampled": compose(PLAIN, liadmm(gamma=0.1, average="sampled", dual_weight=0.5)),
    "liadmm, stale": compose(
        BASE,
        liadmm(0.1, "training", average="sampled", upload="before", first_dual=0.5),
    ),
    "celiadmm": compose(PLAIN, celiadmm(gamma=0.1, k0=3)),
    "admm": compose(BASE, admm(rho=0.1)),
    "ceadmm": compose(BASE, ceadmm(rho=0.1, k0=2)),
    "fedadmm": compose(BASE, fedadmm(rho=0.1)),
    "fedadmm without momentum": compose(PLAIN, fedadmm(rho=0.1)),
    "fedadam": compose(BASE, fedadam()),
    "fedyogi": compose(BASE, fedyogi()),
    "fedadagrad": compose(BASE, fedadagrad()),
    "scaffold": compose(PLAIN, scaffold()),
    "scaffold by examples": compose(PLAIN, scaffold(weigh="examples")),
    "fednova": compose(BASE, fednova()),
    "feddyn": compose(BASE, feddyn(alpha=0.1)),
    "median": compose(BASE, median()),
    "trimmed-mean": compose(BASE, trimmed_mean(share=0.2)),
    "krum": compose(BASE, krum(byzantine=1, keep=2)),
    "geometric-median": compose(BASE, geometric_median()),
    "mda": compose(BASE, mda()),
    "caf": compose(BASE, caf()),
    "dnc": compose(BASE, dnc(byzantine=2)),
    "centred-clipping": compose(BASE, centred_clipping(radius=0.5)),
    "bulyan": compose(replace(BASE, select=Uniformly(7)), bulyan()),
    "meamed": compose(BASE, meamed()),
    "fltrust": compose(BASE, fltrust(root=2)),
    "sign-guard": compose(BASE, sign_guard()),
    "norm-bound": compose(BASE, norm_bound()),
    "nnm x trimmed-mean": compose(BASE, trimmed_mean(share=0.2), nnm()),
    "bucketing x median": compose(BASE, median(), bucketing(size=2)),
    "bucketing x centred-clipping": compose(
        BASE, centred_clipping(radius=0.5, iterations=3), bucketing(size=2)
    ),
    "top-k": compose(BASE, top_k(share=0.1)),
    "sign": compose(BASE, sign()),
    "powersgd": compose(BASE, powersgd(rank=1)),
    "eden": compose(BASE, eden(bits=4)),
    "download": compose(BASE, download(bits=8)),
    "clip, sign x fedadmm": compose(PLAIN, fedadmm(rho=0.1), clip(norm=2.0), sign()),
    "clip, top-k x fedadmm": compose(PLAIN, fedadmm(rho=0.1), clip(norm=2.0), top_k(share=0.2)),
    "qfedavg": compose(BASE, qfedavg(q=1.0)),
    "fedbn": compose(BASE, fedbn()),
    "fedper": compose(BASE, fedper()),
    "fedper x fedavgm": compose(PLAIN, fedper(), fedavgm(0.9), quantize(bits=8)),
    "fedrep": compose(BASE, fedrep(head_epochs=1)),
    "fedbabu": compose(BASE, fedbabu()),
    "lg-fedavg x median": compose(BASE, lg_fedavg(), median()),
    "local-only": compose(BASE, local_only()),
    "fine-tune x fedprox": compose(BASE, fine_tune(), fedprox(0.1)),
    "ditto": compose(BASE, ditto(0.5)),
    "ditto x fedprox x fedavgm": compose(
        PLAIN, ditto(0.5), fedprox(0.1), fedavgm(0.9), quantize(bits=8)
    ),
    "apfl": compose(BASE, apfl()),
    "pfedme": compose(PLAIN, pfedme(lambda_=5.0, k=2)),
    "per-fedavg": compose(BASE, per_fedavg(alpha=0.1)),
    "per-fedavg, hessian-free": compose(BASE, per_fedavg(alpha=0.1, delta=0.01)),
    "moon x fedavgm": compose(BASE, moon(), fedavgm(0.9)),
    "fedala": compose(BASE, fedala()),
    "fedproto": compose(BASE, fedproto()),
    "fedcm": compose(PLAIN, fedcm(alpha=0.3)),
    "fedcm with weight decay": compose(DECAYED, fedcm(alpha=0.5)),
    "clip": compose(BASE, clip(norm=0.5)),
    "quantize": compose(BASE, quantize(bits=8)),
    "clip, quantize without momentum": compose(PLAIN, clip(norm=0.5), quantize(bits=6)),
    "clip, quantize x scaffold with momentum": compose(
        BASE, scaffold(), clip(norm=0.5), quantize(bits=8)
    ),
    "clip, quantize x fedadmm": compose(PLAIN, fedadmm(rho=0.1), clip(norm=2.0), quantize(bits=8)),
    "clip, quantize x median": compose(BASE, median(), clip(norm=0.5), quantize(bits=8)),
    "clip, quantize x fedns": compose(BASE, fedns(), clip(norm=0.5), quantize(bits=8)),
    "fedbuff": compose(BASE, fedbuff(buffer=3)),
    "fedbuff x fedprox x fedavgm": compose(PLAIN, fedbuff(buffer=3), fedprox(0.1), fedavgm(0.9)),
    "fedasync": compose(BASE, fedasync()),
    "momentum kept between rounds": replace(BASE, reset=False),
    "noise on gradients": replace(BASE, solve=Noisy(BASE.solve, 0.05)),
    "weights by chance": replace(PLAIN, objective=Objective().times(ByChance())),
    "privacy by an adaptive clip": with_privacy(BASE, PROTECTION),
    "privacy in bands x fedprox x fedavgm": with_privacy(
        compose(PLAIN, fedprox(0.1), fedavgm(0.9), quantize(bits=8)), BANDED
    ),
    "focal, balanced, clipped, by adamw that is kept": replace(
        BASE, objective=FOCAL, solve=ClippedByValue(ClippedByNorm(ADAMW, 0.5), 0.05), reset=False
    ),
}


def _private(base: Algorithm) -> Algorithm:
    return protect_examples(base, clip=0.5, noise=0.8)


PRIVATE = {
    "momentum and weight decay": _private(BASE),
    "fedprox": compose(_private(PLAIN), fedprox(0.1)),
    "feddyn": compose(_private(PLAIN), feddyn(alpha=0.1)),
    "scaffold with momentum": compose(_private(BASE), scaffold()),
    "clipped, by adamw that is kept": _private(
        replace(BASE, solve=ClippedByNorm(ADAMW, 0.5), reset=False)
    ),
    "fedvc": compose(_private(PLAIN), fedvc(size=8)),
    "fedadmm": compose(_private(PLAIN), fedadmm(rho=0.1)),
    "fedns, counts with noise": compose(protect_examples(PLAIN, 0.5, 0.8, 3.0), fedns()),
    "an asynchronous server": compose(_private(PLAIN), fedbuff(buffer=3)),
    "one step of a few examples": _private(replace(PLAIN, draw=Steps(2, 1, 1, "steps"))),
}
"""Algorithms that protect single examples: for models that have no batch normalisation."""
