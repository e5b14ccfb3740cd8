"""FedVC (Hsu, Qi and Brown, ECCV 2020, arXiv:2003.08082), algorithm 1: virtual clients.

Clients are drawn in proportion to what they hold, and each trains on N_VC examples of its own, for
N_VC / B steps: without replacement if it has that many, otherwise with replacement. So every
virtual client counts the same. With n_k = N_VC for all clients, one epoch, and clients chosen
without replacement, it is FedAvg.
"""

from dataclasses import replace
from typing import Literal

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces import (
    ByExamples,
    BySize,
    Epochs,
    Equally,
    PoissonBatches,
    Virtual,
)
from fedlens.algorithm.slots import Draw


@paper
def fedvc(
    base: Algorithm,
    size: int = 256,
    replacement: bool = True,
    weigh: Literal["equally", "examples"] = "equally",
) -> Algorithm:
    """Train virtual clients of one size.

    Args:
        size: N_VC, a multiple of the batch size. The number of local epochs plays no role.
        replacement: whether a client may be drawn twice in a round, as several virtual clients.
            Only then is the choice proportional to what clients hold.
        weigh: `examples` weighs by n_k again, the literal reading of the paper's algorithm; since
            the choice already favours large clients, that counts them twice.
    """
    if not isinstance(base.draw, Epochs | PoissonBatches):
        raise ValueError(
            "fedvc sets what clients draw: leave local.steps, max_steps and other rules for it out"
        )
    batch = base.draw.batch_size
    if size < 1 or size % batch:
        raise ValueError(
            f"fedvc: a virtual client of {size} examples does not fill batches of {batch}: "
            f"choose a multiple of {batch}"
        )
    draw: Draw = Virtual(size, batch)
    if isinstance(base.draw, PoissonBatches):  # as many steps, of batches that protect examples
        draw = replace(base.draw, amount=size // batch, of="steps")
    return replace(
        base,
        select=BySize(base.select.cohort_size, replacement),
        draw=draw,
        weigh=Equally() if weigh == "equally" else ByExamples(),
    )
