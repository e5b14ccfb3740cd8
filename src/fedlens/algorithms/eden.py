"""Quantising after a random rotation, EDEN (Vargaftik et al., ICML 2022, arXiv:2108.08842).

A client rotates each tensor x of n entries by signs drawn from a seed and Hadamard transforms, so
that its entries are nearly normal, and sends for each the nearest of the 2^b levels c that are the
best for a normal number (Lloyd and Max), with the seed and a scale S. The server reads R^-1(S c):

    S = ||x||^2 / <R x, c>  is right in expectation,   S = <R x, c> / ||c||^2  has the least error.

Of ||x||^2 an error of .571, .133, .036, .0096 remains at 1, 2, 3, 4 bits; .363, .117, .035, .0095
with the least error. With 1 bit it is DRIVE (Vargaftik et al., NeurIPS 2021).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import ChannelStep, Encoded
from fedlens.core import Memory, Tree, keys
from fedlens.core.bits import SCALE_BITS, from_bits, scale_and_codes, to_bits
from fedlens.network.layout import Layout, Role

SEED_BITS = 64
LEVELS = {  # those above 0, by the number of bits
    1: (0.797884560802865,),
    2: (0.452780034636490, 1.510417608499093),
    3: (0.245094178944221, 0.756005281205877, 1.343909278505000, 2.151945704536985),
    4: (
        *(0.128395029851147, 0.388048299490290, 0.656759118532463, 0.942340456486962),
        *(1.256231197347177, 1.618046386021882, 2.069017226531389, 2.732589570995155),
    ),
}
PASSES = 4  # over the first and the last 2^k entries in turns, where n is not 2^k


@dataclass(frozen=True)
class Eden(ChannelStep):
    bits: int
    unbiased: bool = True

    def encode(self, update: Tree, memory: Memory, client_keys: Tensor, layout: Layout) -> Encoded:
        sent = dict(update)
        notes: dict[str, Tree] = {"scale": {}, "seed": {}, "codes": {}}
        for number, (name, u) in enumerate(sorted(update.items())):
            if layout.entries[name].role == "buffer":
                continue
            x, seed = u.flatten(1).double(), keys.fold(client_keys, number)  # [C, n], [C]
            turned, levels = _rotated(x, seed), self._levels(x)
            norm = x.norm(dim=1, keepdim=True)
            unit = turned * x.shape[1] ** 0.5 / norm.clamp(min=1e-300)
            codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)
            c = levels[codes]
            along = (turned * c).sum(1)  # > 0, unless x is 0
            squared = norm[:, 0].square() if self.unbiased else along
            by = along if self.unbiased else c.square().sum(1)
            scale = (squared / by.clamp(min=1e-300)).float()
            sent[name] = self._read(scale, seed, codes).view(u.shape).to(u)
            for part, tensor in (("scale", scale), ("seed", seed), ("codes", codes.byte())):
                notes[part][name] = tensor
        return Encoded(sent, notes=notes)

    def _read(self, scale: Tensor, seed: Tensor, codes: Tensor) -> Tensor:
        """What the server reads [C, n], in float32 as the numbers of other steps."""
        turned = self._levels(scale)[codes] * scale.double()[:, None]
        return _rotated(turned, seed, back=True).float().double()

    def _levels(self, like: Tensor) -> Tensor:
        above = LEVELS[self.bits]
        # Filled on the device: a recorded round copies nothing to it.
        one = like.new_empty(1, dtype=torch.float64)
        return torch.cat([torch.full_like(one, c) for c in (*(-c for c in above[::-1]), *above)])

    def num_bits(self, shape: torch.Size, bits: int, role: Role) -> int:
        return bits if role == "buffer" else shape.numel() * self.bits + SCALE_BITS + SEED_BITS

    def pack(self, numbers: Tensor, role: Role, notes: Tree) -> Tree | None:
        one = {name: tensor[None] for name, tensor in notes.items()}
        if role == "buffer" or one["codes"].numel() != len(numbers):
            return None
        if not torch.equal(
            self._read(one["scale"], one["seed"], one["codes"].long().flatten(1))[0], numbers
        ):
            return None  # another step has changed them
        codes = to_bits(notes["codes"], self.bits)
        return {"scale": notes["scale"], "seed": notes["seed"], "codes": codes}

    def unpack(self, parts: Tree, count: int, numbers: Callable[[int], Tensor]) -> Tensor:
        scale, codes = scale_and_codes(parts)
        seed = parts.get("seed")
        if seed is None or seed.shape or seed.dtype != torch.int64:
            raise ValueError("a tensor lacks its seed")
        return self._read(scale[None], seed[None], from_bits(codes, count, self.bits)[None])[0]


def _rotated(x: Tensor, seed: Tensor, back: bool = False) -> Tensor:
    """x [C, n] turned by the rotation of each seed [C], or turned back."""
    n = x.shape[1]
    if not n:
        return x
    size = 1 << (n.bit_length() - 1)  # the largest power of two that fits
    passes, entry = range(PASSES if size < n else 1), torch.arange(size, device=x.device)
    for number in reversed(passes) if back else passes:
        word = keys.fold(keys.fold(seed, number)[:, None], entry)
        signs, place = 1.0 - 2.0 * (word & 1), (n - size) * (number % 2)
        part = x[:, place : place + size]
        part = _hadamard(part) * signs if back else _hadamard(part * signs)
        x = torch.cat([x[:, :place], part, x[:, place + size :]], 1)
    return x


def _hadamard(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of rows [C, 2^k], which is its own inverse."""
    rows, size = x.shape
    half = 1
    while half < size:
        a, b = x.view(rows, -1, 2, half).unbind(2)
        x = torch.stack([a + b, a - b], 2).view(rows, size)
        half *= 2
    return x * (1 / math.sqrt(size))


@paper
def eden(base: Algorithm, bits: int = 4, unbiased: bool = True) -> Algorithm:
    """Rotate each client's update at random, and round it to a few bits an entry.

    Args:
        bits: of an entry, from 1 to 4.
        unbiased: whether what is read is right in expectation, or as near as can be.
    """
    if bits not in LEVELS:
        raise ValueError(f"eden: bits is {bits}: choose 1 to 4")
    return replace(base, channel=(*base.channel, Eden(bits, unbiased)))
