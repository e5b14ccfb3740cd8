"""FedAvg (McMahan et al., AISTATS 2017, arXiv:1602.05629), algorithm 1.

The server's model becomes the mean of the clients' models, each weighted by its examples:
w = sum_k (n_k / n) w_k. Every slot's default is FedAvg; this file only adds its one option.
"""

from dataclasses import replace
from typing import Literal

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces import ByExamples


@paper
def fedavg(base: Algorithm, over: Literal["cohort", "population"] = "cohort") -> Algorithm:
    """Average the clients' models.

    Args:
        over: what n counts. `cohort`: the examples of the clients that take part. `population`:
            those of all clients, as if the others had sent back the model unchanged.
    """
    return replace(base, weigh=ByExamples(over))
