"""Top-k sparsification with error feedback (Stich et al., NeurIPS 2018, arXiv:1809.07599).

Of each tensor a client sends the k entries of largest magnitude, as values and positions. What it
does not send it remembers and adds to its next update: what it sent in all rounds, plus what it
remembers, is the sum of its updates. With share = 1 it is FedAvg.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.channel import NUMBERS
from fedlens.algorithm.slots import ChannelStep, Encoded
from fedlens.core import Memory, Tree
from fedlens.network.layout import Layout, Role

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
        """The k largest entries of each row [C, ...] in float32, and zeros elsewhere."""
        flat = update.flatten(1)
        if not self.drops(flat.shape[1]):
            return update
        places = flat.abs().topk(self.count(flat.shape[1]), 1).indices
        values = flat.gather(1, places).float().to(flat)
        return torch.zeros_like(flat).scatter_(1, places, values).view(update.shape)

    def count(self, numbers: int) -> int:
        return ceil(self.share * numbers)

    def drops(self, numbers: int) -> bool:
        return self.count(numbers) < numbers

    def num_bits(self, count: int, bits: int, role: Role) -> int:
        if role == "buffer" or not self.drops(count):
            return bits
        return self.count(count) * POSITION_BITS + ceil(bits * self.count(count) / max(count, 1))

    def pack(self, numbers: Tensor, role: Role) -> Tree | None:
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
