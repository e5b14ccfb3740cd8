"""FedBN (Li et al., ICLR 2021, arXiv:2102.07623): clients keep their own normalisation layers.

The server's copy of them is the clients' mean: it is used to evaluate the server's model, and as
the start of clients never selected before. With no normalisation layers it is FedAvg.
"""

from dataclasses import replace

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces import OwnNorms


@paper
def fedbn(base: Algorithm) -> Algorithm:
    """Let each client normalise in its own way."""
    return replace(base, personal=OwnNorms())
