"""Stochastic rounding to b bits, as in QSGD (Alistarh et al., NeurIPS 2017, arXiv:1610.02132).

For each tensor u of an update a client sends its largest magnitude s and, for every entry, an
integer q in -L..L, where L = 2^(b-1) - 1. q is one of the two neighbours of L u / s, the nearer one
with the higher probability, so that s q / L is u in expectation. The error of an entry is below
s / L. A tensor takes b bits per entry, and 32 bits for s.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import ChannelStep, Encoded
from fedlens.core import Memory, Tree, keys
from fedlens.core.bits import from_bits, to_bits
from fedlens.network.layout import Layout, Role

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
            scale = (largest * (1 + 2**-23)).float()  # [C, 1]
            entry = torch.arange(flat.shape[1], device=u.device)
            chance = keys.uniform(keys.fold(keys.fold(client_keys, number)[:, None], entry))
            rounded = (flat / _step(scale, levels) + chance).floor()
            sent[name] = _on_grid(rounded, scale, levels).view(u.shape)
        return Encoded({name: sent[name] for name in update})

    def num_bits(self, count: int, bits: int, role: Role) -> int:
        return count * self.bits + SCALE_BITS

    def pack(self, numbers: Tensor, role: Role) -> Tree | None:
        levels = 2 ** (self.bits - 1) - 1
        for scale in _scales(numbers.abs().max(), levels):
            rounded = (numbers / _step(scale, levels)).round()
            if torch.equal(_on_grid(rounded, scale, levels), numbers):
                return {"scale": scale, "codes": to_bits(rounded + levels, self.bits)}
        return None  # another step has changed them

    def unpack(self, parts: Tree, count: int, numbers: Callable[[int], Tensor]) -> Tensor:
        scale, codes = parts.get("scale"), parts.get("codes")
        if scale is None or codes is None or scale.shape or scale.dtype != torch.float32:
            raise ValueError("a tensor lacks its scale or its codes")
        levels = 2 ** (self.bits - 1) - 1
        return _on_grid(from_bits(codes, count, self.bits) - levels, scale, levels)


def _step(scale: Tensor, levels: int) -> Tensor:
    return scale.double().clamp(min=1e-300) / levels


def _on_grid(rounded: Tensor, scale: Tensor, levels: int) -> Tensor:
    """The numbers that the server reads, in float32 as those of other steps."""
    return (rounded * _step(scale, levels)).float().double()


def _scales(largest: Tensor, levels: int) -> Iterator[Tensor]:
    """The scales for which `encode` gives this largest magnitude, which is L or L - 1 steps."""
    yield largest.float()
    if levels > 1:
        near = (largest * levels / (levels - 1)).float()
        yield near
        yield torch.nextafter(near, near.new_tensor(torch.inf))
        yield torch.nextafter(near, near.new_tensor(0.0))


@paper
def quantize(base: Algorithm, bits: int = 8) -> Algorithm:
    """Round each client's update to a few bits an entry, right in expectation.

    Args:
        bits: of an entry, from 2 to 16.
    """
    if bits not in BITS:
        raise ValueError(f"quantize: bits is {bits}: choose {BITS[0]} to {BITS[-1]}")
    return replace(base, channel=(*base.channel, Quantize(bits)))
