"""One paper per file, with both its halves: what clients do, and what the server does."""

from collections.abc import Callable, Mapping

from fedlens.algorithm import Amendment
from fedlens.algorithms.admm import admm as admm
from fedlens.algorithms.admm import ceadmm as ceadmm
from fedlens.algorithms.admm import fedadmm as fedadmm
from fedlens.algorithms.apfl import apfl as apfl
from fedlens.algorithms.bucketing import bucketing as bucketing
from fedlens.algorithms.bulyan import bulyan as bulyan
from fedlens.algorithms.by_distance import caf as caf
from fedlens.algorithms.by_distance import dnc as dnc
from fedlens.algorithms.by_distance import mda as mda
from fedlens.algorithms.centred_clipping import centred_clipping as centred_clipping
from fedlens.algorithms.clip import clip as clip
from fedlens.algorithms.ditto import ditto as ditto
from fedlens.algorithms.eden import eden as eden
from fedlens.algorithms.fedala import fedala as fedala
from fedlens.algorithms.fedasync import fedasync as fedasync
from fedlens.algorithms.fedavg import fedavg as fedavg
from fedlens.algorithms.fedavgm import fedavgm as fedavgm
from fedlens.algorithms.fedbuff import fedbuff as fedbuff
from fedlens.algorithms.fedcm import fedcm as fedcm
from fedlens.algorithms.feddyn import feddyn as feddyn
from fedlens.algorithms.fedir import fedir as fedir
from fedlens.algorithms.fednova import fednova as fednova
from fedlens.algorithms.fedns import fedns as fedns
from fedlens.algorithms.fedopt import fedadagrad as fedadagrad
from fedlens.algorithms.fedopt import fedadam as fedadam
from fedlens.algorithms.fedopt import fedyogi as fedyogi
from fedlens.algorithms.fedproto import fedproto as fedproto
from fedlens.algorithms.fedprox import fedprox as fedprox
from fedlens.algorithms.fedvc import fedvc as fedvc
from fedlens.algorithms.fine_tune import fine_tune as fine_tune
from fedlens.algorithms.fltrust import fltrust as fltrust
from fedlens.algorithms.geometric_median import geometric_median as geometric_median
from fedlens.algorithms.krum import krum as krum
from fedlens.algorithms.lambda_sum import lambda_sum as lambda_sum
from fedlens.algorithms.lastfc import lastfc as lastfc
from fedlens.algorithms.liadmm import celiadmm as celiadmm
from fedlens.algorithms.liadmm import liadmm as liadmm
from fedlens.algorithms.local_only import local_only as local_only
from fedlens.algorithms.meamed import meamed as meamed
from fedlens.algorithms.median import median as median
from fedlens.algorithms.moon import moon as moon
from fedlens.algorithms.nnm import nnm as nnm
from fedlens.algorithms.norm_bound import norm_bound as norm_bound
from fedlens.algorithms.own_layers import fedbabu as fedbabu
from fedlens.algorithms.own_layers import fedbn as fedbn
from fedlens.algorithms.own_layers import fedper as fedper
from fedlens.algorithms.own_layers import fedrep as fedrep
from fedlens.algorithms.own_layers import lg_fedavg as lg_fedavg
from fedlens.algorithms.per_fedavg import per_fedavg as per_fedavg
from fedlens.algorithms.pfedme import pfedme as pfedme
from fedlens.algorithms.powersgd import powersgd as powersgd
from fedlens.algorithms.qfedavg import qfedavg as qfedavg
from fedlens.algorithms.quantize import download as download
from fedlens.algorithms.quantize import quantize as quantize
from fedlens.algorithms.scaffold import scaffold as scaffold
from fedlens.algorithms.sign import sign as sign
from fedlens.algorithms.sign_guard import sign_guard as sign_guard
from fedlens.algorithms.top_k import top_k as top_k
from fedlens.algorithms.trimmed_mean import trimmed_mean as trimmed_mean
from fedlens.config import names

ALGORITHMS: Mapping[str, Callable[..., Amendment]] = names.ALGORITHMS
