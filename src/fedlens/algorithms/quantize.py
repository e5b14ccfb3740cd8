"""Stochastic rounding to b bits, as in QSGD (Alistarh et al., NeurIPS 2017, arXiv:1610.02132).

For each tensor u of an update a client sends its largest magnitude s and, for every entry, an
integer q in -L..L, where L = 2^(b-1) - 1. q is one of the two neighbours of L u / s, the nearer one
with the higher probability, so that s q / L is u in expectation. The error of an entry is below
s / L. A tensor takes b bits per entry, and 32 bits for s.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import ChannelStep, Encoded
from fedlens.core import Memory, Tree, keys
from fedlens.network.layout import Layout

BITS = range(2, 17)
SCALE_BITS = 32


@dataclass(frozen=True)
class Quantize(ChannelStep):
    bits: int

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        levels = 2 ** (self.bits - 1) - 1
        sent = {}
        for number, (name, u) in enumerate(sorted(update.items())):
            flat = u.flatten(1)  # [C, n]
            # The scale as it is sent: in float32, and not below the magnitude of any entry.
            largest = flat.abs().amax(1, keepdim=True)
            scale = (largest * (1 + 2**-23)).float().double().clamp(min=1e-300)  # [C, 1]
            entry = torch.arange(flat.shape[1], device=u.device)
            chance = keys.uniform(keys.fold(keys.fold(client_keys, number)[:, None], entry))
            rounded = (flat / scale * levels + chance).floor()
            sent[name] = (rounded * (scale / levels)).view(u.shape)
        return Encoded({name: sent[name] for name in update})

    def num_bits(self, numbers: int, bits: int) -> int:
        return numbers * self.bits + SCALE_BITS


@paper
def quantize(base: Algorithm, bits: int = 8) -> Algorithm:
    """Round each client's update to a few bits an entry, right in expectation.

    Args:
        bits: of an entry, from 2 to 16.
    """
    if bits not in BITS:
        raise ValueError(f"quantize: bits is {bits}: choose {BITS[0]} to {BITS[-1]}")
    return replace(base, channel=(*base.channel, Quantize(bits)))
