"""One paper per file, with both its halves: what clients do, and what the server does."""

from collections.abc import Callable, Mapping

from fedlens.algorithm import Amendment
from fedlens.algorithms.admm import admm, ceadmm, fedadmm
from fedlens.algorithms.bucketing import bucketing
from fedlens.algorithms.centred_clipping import centred_clipping
from fedlens.algorithms.clip import clip
from fedlens.algorithms.fedasync import fedasync
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedavgm import fedavgm
from fedlens.algorithms.fedbn import fedbn
from fedlens.algorithms.fedbuff import fedbuff
from fedlens.algorithms.fedcm import fedcm
from fedlens.algorithms.feddyn import feddyn
from fedlens.algorithms.fedir import fedir
from fedlens.algorithms.fednova import fednova
from fedlens.algorithms.fedns import fedns
from fedlens.algorithms.fedopt import fedadagrad, fedadam, fedyogi
from fedlens.algorithms.fedper import fedper
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.fedvc import fedvc
from fedlens.algorithms.krum import krum
from fedlens.algorithms.lambda_sum import lambda_sum
from fedlens.algorithms.lastfc import lastfc
from fedlens.algorithms.liadmm import celiadmm, liadmm
from fedlens.algorithms.median import median
from fedlens.algorithms.qfedavg import qfedavg
from fedlens.algorithms.quantize import quantize
from fedlens.algorithms.scaffold import scaffold
from fedlens.algorithms.top_k import top_k
from fedlens.algorithms.trimmed_mean import trimmed_mean
from fedlens.config import names

ALGORITHMS: Mapping[str, Callable[..., Amendment]] = names.ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "admm",
    "bucketing",
    "ceadmm",
    "celiadmm",
    "centred_clipping",
    "clip",
    "fedadagrad",
    "fedadam",
    "fedadmm",
    "fedasync",
    "fedavg",
    "fedavgm",
    "fedbn",
    "fedbuff",
    "fedcm",
    "feddyn",
    "fedir",
    "fednova",
    "fedns",
    "fedper",
    "fedprox",
    "fedvc",
    "fedyogi",
    "krum",
    "lambda_sum",
    "lastfc",
    "liadmm",
    "median",
    "qfedavg",
    "quantize",
    "scaffold",
    "top_k",
    "trimmed_mean",
]
