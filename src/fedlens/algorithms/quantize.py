"""Stochastic rounding to b bits, as in QSGD (Alistarh et al., NeurIPS 2017, arXiv:1610.02132).

For each tensor u of an update a client sends its largest magnitude s and, for every entry, an
integer q in -L..L, where L = 2^(b-1) - 1. q is one of the two neighbours of L u / s, the nearer one
with the higher probability, so that s q / L is u in expectation. The error of an entry is below
s / L. A tensor takes b bits per entry, and 32 bits for s.

The way down in few bits: the server's model as a quantised difference to what clients have.

Clients hold a model h, at first the server's x. After a round the server sends Q(x - h), stochastic
rounding to b bits as in QSGD, and both add it to h: the server's own x stays exact, and what
rounding leaves out of one difference is in the next one. This is the way down of MCM (Philippenko
and Dieuleveut, NeurIPS 2021, arXiv:2102.12528). A client that was not there in the round before is
sent h as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import ChannelStep, Encoded
from fedlens.core import Memory, Tree, keys
from fedlens.core.bits import SCALE_BITS, from_bits, scale_and_codes, to_bits
from fedlens.network.layout import Layout, Role

BITS = range(2, 17)


@dataclass(frozen=True)
class Quantize(ChannelStep):
    bits: int

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        levels = 2 ** (self.bits - 1) - 1
        sent, scales = {}, {}
        for number, (name, u) in enumerate(sorted(update.items())):
            flat = u.flatten(1)  # [C, n]
            # The scale as it is sent: in float32, and not below the magnitude of any entry.
            largest = flat.abs().amax(1, keepdim=True)
            scale = (largest * (1 + 2**-23)).float()  # [C, 1]
            entry = torch.arange(flat.shape[1], device=u.device)
            chance = keys.uniform(keys.fold(keys.fold(client_keys, number)[:, None], entry))
            rounded = (flat / _step(scale, levels) + chance).floor()
            sent[name] = _on_grid(rounded, scale, levels).view(u.shape)
            scales[name] = scale[:, 0]
        return Encoded({name: sent[name] for name in update}, notes={"scale": scales})

    def num_bits(self, shape: torch.Size, bits: int, role: Role) -> int:
        return shape.numel() * self.bits + SCALE_BITS

    def pack(self, numbers: Tensor, role: Role, notes: Tree) -> Tree | None:
        levels, scale = 2 ** (self.bits - 1) - 1, notes["scale"]
        rounded = (numbers / _step(scale, levels)).round()
        if not torch.equal(_on_grid(rounded, scale, levels), numbers):
            return None  # another step has changed them
        return {"scale": scale, "codes": to_bits(rounded + levels, self.bits)}

    def unpack(self, parts: Tree, count: int, numbers: Callable[[int], Tensor]) -> Tensor:
        scale, codes = scale_and_codes(parts)
        levels = 2 ** (self.bits - 1) - 1
        return _on_grid(from_bits(codes, count, self.bits) - levels, scale, levels)


def _step(scale: Tensor, levels: int) -> Tensor:
    return scale.double().clamp(min=1e-300) / levels


def _on_grid(rounded: Tensor, scale: Tensor, levels: int) -> Tensor:
    """The numbers that the server reads, in float32 as those of other steps."""
    return (rounded * _step(scale, levels)).float().double()


def stochastic_rounding(paper: str, bits: int) -> Quantize:
    if bits not in BITS:
        raise ValueError(f"{paper}: bits is {bits}: choose {BITS[0]} to {BITS[-1]}")
    return Quantize(bits)


@paper
def quantize(base: Algorithm, bits: int = 8) -> Algorithm:
    """Round each client's update to a few bits an entry, right in expectation.

    Args:
        bits: of an entry, from 2 to 16.
    """
    return replace(base, channel=(*base.channel, stochastic_rounding("quantize", bits)))


@paper
def download(base: Algorithm, bits: int = 8) -> Algorithm:
    """Send clients what the model has changed by, rounded to a few bits an entry.

    Args:
        bits: of an entry, from 2 to 16.
    """
    return replace(base, download=(*base.download, stochastic_rounding("download", bits)))
