"""Local-only: every client trains a model of its own, and nothing is sent.

w_k = w_k - lr grad F_k(w_k), round after round, from the initial weights. What any federation must
beat to be worth it: by the same rounds, batches and rates as the other algorithms.
"""

from dataclasses import replace

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces import OwnModel


@paper
def local_only(base: Algorithm) -> Algorithm:
    """Let each client train alone."""
    return replace(base, personal=OwnModel())
