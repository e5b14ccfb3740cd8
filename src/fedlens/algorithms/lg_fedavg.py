"""LG-FedAvg (Liang et al., "Think Locally, Act Globally", 2020, arXiv:2001.01523).

Clients keep the lower layers, which represent their own images; the head is averaged as in FedAvg.
It is FedPer upside down. Both parts take every local step together.
"""

from dataclasses import replace

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces import OwnBody


@paper
def lg_fedavg(base: Algorithm, head: str | None = None) -> Algorithm:
    """Let each client keep all layers but the head.

    Args:
        head: the name of the layer that is averaged, with all that is in it; the last linear
            layer, if none is named.
    """
    return replace(base, personal=OwnBody(head))
