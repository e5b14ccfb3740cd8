"""FedPer (Arivazhagan et al., 2019, arXiv:1912.00818): every client keeps a head of its own.

All layers below the head are averaged as in FedAvg. The head starts from the server's, which
nobody ever changes, and never leaves the client, so clients may use the same outputs for different
things. A client is measured by the server's layers with its own head.
"""

from dataclasses import replace

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces import OwnHead


@paper
def fedper(base: Algorithm, head: str | None = None) -> Algorithm:
    """Let each client keep a head of its own.

    Args:
        head: the name of the layer that clients keep, with all that is in it; the last linear
            layer, if none is named.
    """
    return replace(base, personal=OwnHead(head))
