"""FedAvgM (Hsu et al., 2019, arXiv:1909.06335; 2020, arXiv:2003.08082): server momentum.

v = beta * v + g;  w = w - gamma * v, where g is the server's model minus the clients' mean and
gamma is `server.lr`. With beta = 0 it is FedAvg.
"""

from dataclasses import replace

from fedlens.algorithm import Algorithm, below_one, paper
from fedlens.algorithm.pieces import Sgd
from fedlens.core import Number


@paper
def fedavgm(base: Algorithm, momentum: Number = 0.9, nesterov: bool = False) -> Algorithm:
    """Give the server's steps momentum.

    Args:
        momentum: beta.
        nesterov: step along g + beta * v, as some readings of the 2019 paper do.
    """
    below_one(momentum, "fedavgm: momentum")
    lr = base.advance.lr if isinstance(base.advance, Sgd) else 1.0
    return replace(base, advance=Sgd(lr, momentum, nesterov=nesterov))
