"""One paper a file, both its halves in it."""

from collections.abc import Callable

from fedlens.algorithm import Amendment
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedavgm import fedavgm
from fedlens.algorithms.fedprox import fedprox
from fedlens.algorithms.lambda_sum import lambda_sum

ALGORITHMS: dict[str, Callable[..., Amendment]] = {
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedprox": fedprox,
    "lambda-sum": lambda_sum,
}
