"""The way down in few bits: the server's model as a quantised difference to what clients have.

Clients hold a model h, at first the server's x. After a round the server sends Q(x - h), stochastic
rounding to b bits as in QSGD, and both add it to h: the server's own x stays exact, and what
rounding leaves out of one difference is in the next one. This is the way down of MCM (Philippenko
and Dieuleveut, NeurIPS 2021, arXiv:2102.12528). A client that was not there in the round before is
sent h as it is.
"""

from dataclasses import replace

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithms.quantize import stochastic_rounding


@paper
def download(base: Algorithm, bits: int = 8) -> Algorithm:
    """Send clients what the model has changed by, rounded to a few bits an entry.

    Args:
        bits: of an entry, from 2 to 16.
    """
    return replace(base, download=(*base.download, stochastic_rounding("download", bits)))
