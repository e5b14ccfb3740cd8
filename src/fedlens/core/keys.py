"""Randomness by hashing: a key is 64 random bits, and folding words into it makes new keys.

A draw depends on what it is for (the seed, the round, the purpose, the client, a counter) and
never on earlier draws, so it is the same for every engine, device, chunk and order of work. Keys
are int64 tensors; their arithmetic wraps around and is elementwise, so it also runs under
`torch.func.vmap`. Rounds are planned with NumPy arrays instead of tensors: on a few numbers the
operations of NumPy take a fraction of the time.

A thousand draws from one key: `uniform(fold(key, torch.arange(1000)))`. Use a key for one thing
only: fold a `purpose` into it for each use.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
Keys = TypeVar("Keys", Tensor, Array)


def signed(number: int) -> int:
    """The int64 with the same lowest 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: splitmix64's step from word to word
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
LOWEST = signed(1 << 63)


def purpose(name: str) -> int:
    """A word that stands for `name`: the same on every machine, 63 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def root(seed: int, *words: int) -> Tensor:  # [] int64
    """The key that all others of a run are folded from, with these words folded in."""
    key = _mixed(seed ^ GOLDEN)
    for word in words:
        key = _mixed(key + word * GOLDEN)
    return torch.tensor(signed(key))


def fold(key: Keys, *words: int | Keys) -> Keys:
    """The keys for these words, one word after another; tensors broadcast.

    `fold(k, a, b)` is `fold(fold(k, a), b)`. Under one key, different words give different keys.
    """
    for word in words:
        if isinstance(word, int):
            key = _mix(key + signed(word * GOLDEN))
        elif isinstance(word, Tensor):
            key = _mix(word.to(torch.int64) * signed(GOLDEN) + key)
        else:
            key = _mix(word * signed(GOLDEN) + key)
    return key


def uniform(key: Keys) -> Keys:
    """A number in [0, 1) from each key, float64: its upper 53 bits."""
    bits = _shift(key, 11)
    return (bits.to(torch.float64) if isinstance(bits, Tensor) else bits) * 2.0**-53


def normal(key: Tensor) -> Tensor:
    """A number of the standard normal distribution from each key, float64."""
    radius = (-2 * torch.log1p(-uniform(fold(key, 0)))).sqrt()
    return radius * (2 * math.pi * uniform(fold(key, 1))).cos()


def normals(key: Tensor, count: int) -> Tensor:
    """`count` numbers of the standard normal distribution from one key, float64: two from each
    pair of uniform ones, in half the time of `normal`."""
    words = fold(key, torch.arange(-(-count // 2), device=key.device))
    radius = uniform(fold(words, 0)).neg_().log1p_().mul_(-2).sqrt_()
    angle = uniform(fold(words, 1)).mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def pairs_of_normals(words: Tensor, dtype: torch.dtype) -> Tensor:  # [C, n] -> [C, 2 n]
    """Two standard normal numbers from each word: Box and Muller's, of 32 random bits each."""
    high, low = ((words >> shift) & 0xFFFFFFFF for shift in (32, 0))
    radius = (high.to(dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2)).clamp_(min=0).sqrt_()
    angle = low.to(dtype).mul_(2 * math.pi * 2.0**-32)
    found = radius.new_empty(len(radius), 2 * radius.shape[1])
    torch.mul(radius, angle.cos(), out=found[:, : radius.shape[1]])
    torch.mul(radius, angle.sin_(), out=found[:, radius.shape[1] :])
    return found


def below(key: Keys, bound: int) -> Keys:
    """A whole number in 0..bound - 1 from each key, int64, for bounds up to 2^31."""
    return (_shift(key, 32) * bound) >> 32


def shuffle_segments(offsets: Array, keys: Array) -> Array:
    """A permutation of 0..n-1 that shuffles each segment separately.

    Segment k is offsets[k]..offsets[k + 1] - 1. Its order depends on keys[k] and on its length,
    never on its neighbours.
    """
    sizes = offsets[1:] - offsets[:-1]
    owner, start, own = (
        np.repeat(of_segment, sizes) for of_segment in (np.arange(len(sizes)), offsets[:-1], keys)
    )
    position = np.arange(len(owner)) - start
    # One sort of integers: the segment in the highest bits, a draw, the position in the lowest.
    # The draw has 32 bits whatever the other segments are, unless too few bits are left for it.
    low = max(int(sizes.max()) - 1, 1).bit_length() if len(sizes) else 1
    high = max(len(sizes) - 1, 1).bit_length()
    drawn = fold(own, position)
    width = min(32, 63 - low - high)
    draw = _shift(drawn ^ LOWEST, 64 - width)  # keeps the order of int64
    packed = (owner << (width + low)) | (draw << low) | position
    # Segments of equal length are sorted separately, as rows, which is much faster.
    are_equal = len(sizes) and (sizes == sizes[0]).all()
    packed.reshape(len(sizes) if are_equal else 1, -1).sort()
    places: Array = (packed & ((1 << low) - 1)) + start
    return places


def _shift(z: Keys, count: int) -> Keys:
    """A logical shift to the right: the shift of int64 copies the sign bit."""
    shifted = z >> count
    shifted &= (1 << (64 - count)) - 1
    return shifted


def _mixed(z: int) -> int:
    """`_mix` of the lowest 64 bits of one int, in 0..2^64 - 1: much faster than on a tensor."""
    z %= 2**64
    z = (z ^ z >> 30) * FIRST % 2**64
    z = (z ^ z >> 27) * SECOND % 2**64
    return z ^ z >> 31


def _mix(z: Keys) -> Keys:
    """splitmix64's finaliser, in place: one to one, and each input bit affects each output bit."""
    if not isinstance(z, Tensor):
        bits = z.view(np.uint64)  # unsigned: a logical shift is one operation
        bits ^= bits >> 30
        bits *= FIRST
        bits ^= bits >> 27
        bits *= SECOND
        bits ^= bits >> 31
        return bits.view(np.int64)
    z ^= _shift(z, 30)
    z *= signed(FIRST)
    z ^= _shift(z, 27)
    z *= signed(SECOND)
    z ^= _shift(z, 31)
    return z
