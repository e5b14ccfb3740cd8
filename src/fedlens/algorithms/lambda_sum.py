"""The λ rule of "Practicing Federated Learning" (chapter 3) and the CIFAR-10 report built on it.

w = w + λ sum_k (w_k - w): unweighted, however many examples clients hold, and including buffers.
With λ = 1 / |S| and clients of equal size it is FedAvg.
"""

from dataclasses import replace

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import Constant
from fedlens.core import Number


@paper
def lambda_sum(base: Algorithm, lambda_: Number = 0.1) -> Algorithm:
    """Add every client's update, scaled by the same number.

    Args:
        lambda_: λ, called `lambda` in an experiment file.
    """
    at_least(lambda_, 0, "lambda-sum: lambda")
    return replace(base, weigh=Constant(lambda_))
