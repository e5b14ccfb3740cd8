"""Top-k sparsification with error feedback (Stich et al., NeurIPS 2018, arXiv:1809.07599).

Of each tensor a client sends the k entries of largest magnitude, as values and positions. What it
does not send it remembers and adds to its next update: what it sent in all rounds, plus what it
remembers, is the sum of its updates. With share = 1 it is FedAvg.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.channel import NUMBERS
from fedlens.algorithm.pieces.feedback import Feedback, Short
from fedlens.core import Tree
from fedlens.network.layout import Role

POSITION_BITS = 32


@dataclass(frozen=True)
class TopK(Feedback):
    share: float
    feedback: bool = True

    def shortened(self, whole: Tensor, memory: Mapping[str, Tensor]) -> Short:
        """The k largest entries of each row [C, ...] in float32, and zeros elsewhere."""
        flat = whole.flatten(1)
        if not self.drops(flat.shape[1]):
            return Short(whole)
        places = flat.abs().topk(self.count(flat.shape[1]), 1).indices
        values = flat.gather(1, places).float().to(flat)
        return Short(torch.zeros_like(flat).scatter_(1, places, values).view(whole.shape))

    def count(self, numbers: int) -> int:
        return ceil(self.share * numbers)

    def drops(self, numbers: int) -> bool:
        return self.count(numbers) < numbers

    def num_bits(self, shape: torch.Size, bits: int, role: Role) -> int:
        if role == "buffer" or not self.drops(shape.numel()):
            return bits
        kept = self.count(shape.numel())
        return kept * POSITION_BITS + ceil(bits * kept / max(shape.numel(), 1))

    def pack(self, numbers: Tensor, role: Role, notes: Tree) -> Tree | None:
        if role == "buffer" or not self.drops(len(numbers)):
            return None
        places = numbers.abs().topk(self.count(len(numbers))).indices.sort().values
        return {"places": places.int(), NUMBERS: numbers[places]}

    def unpack(self, parts: Tree, count: int, numbers: Callable[[int], Tensor]) -> Tensor:
        places = parts["places"] if parts.keys() == {"places"} else None
        if places is None or places.dtype != torch.int32 or places.shape != (self.count(count),):
            raise ValueError("a tensor lacks its places")
        if int(places.min()) < 0 or int(places.max()) >= count:
            raise ValueError("a place lies outside of its tensor")
        values = numbers(len(places))
        return torch.zeros(count, dtype=values.dtype).scatter_(0, places.long(), values)


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
