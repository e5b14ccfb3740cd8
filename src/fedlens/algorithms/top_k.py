"""Top-k sparsification with error feedback (Stich et al., NeurIPS 2018, arXiv:1809.07599).

Of each tensor a client sends the k entries of largest magnitude, as values and positions. What it
does not send it remembers and adds to its next update: what it sent in all rounds, plus what it
remembers, is the sum of its updates. With share = 1 it is FedAvg.
"""

from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import ChannelStep, Encoded
from fedlens.core import Memory, Tree
from fedlens.network.layout import Layout

POSITION_BITS = 32


@dataclass(frozen=True)
class TopK(ChannelStep):
    share: float
    feedback: bool = True

    @property
    def remembers(self) -> bool:
        return self.feedback

    def init(self, params: Tree) -> Memory:
        if not self.feedback:
            return {}
        return {"error": {name: torch.zeros_like(p).double() for name, p in params.items()}}

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        error = memory.get("error", {})
        whole = {
            name: u + error[name] if name in error else u
            for name, u in update.items()
            if layout.entries[name].role != "buffer"
        }
        sent = {name: self.largest(u) for name, u in whole.items()}
        left = error | {name: u - sent[name] for name, u in whole.items() if name in error}
        return Encoded(update | sent, memory={"error": left} if error else {})

    def largest(self, update: Tensor) -> Tensor:
        """The k largest entries of each row [C, ...], and zeros elsewhere."""
        flat = update.flatten(1)
        places = flat.abs().topk(self.count(flat.shape[1]), 1).indices
        sent = torch.zeros_like(flat).scatter_(1, places, flat.gather(1, places))
        return sent.view(update.shape)

    def count(self, numbers: int) -> int:
        return ceil(self.share * numbers)

    def num_bits(self, numbers: int, bits: int) -> int:
        return self.count(numbers) * (POSITION_BITS + bits // max(numbers, 1))


@paper
def top_k(base: Algorithm, share: float = 0.01, feedback: bool = True) -> Algorithm:
    """Send only the largest entries of each client's update, and the rest later.

    Args:
        share: of the entries of each tensor, at least one.
        feedback: whether a client remembers what it did not send.
    """
    if not 0 < share <= 1:
        raise ValueError(f"top-k: share is {share}: choose a number above 0, up to 1")
    return replace(base, channel=(*base.channel, TopK(share, feedback)))
