"""Shamir's shares (CACM 1979): any `threshold` of them give a secret, and fewer say nothing of it.

Share x is the value at x of a random polynomial of degree threshold - 1, whose value at 0 is the
secret, in whole numbers modulo a prime.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache

PRIME = 2**521 - 1
SECRET = 32  # bytes of a secret
SHARE = 66  # bytes of a share


def split(secret: bytes, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """A share of the secret for each place, a number from 1 on."""
    assert len(secret) == SECRET
    tail = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    found = {}
    for x in places:
        value = 0
        for coefficient in (*tail, int.from_bytes(secret)):
            value = (value * x + coefficient) % PRIME
        found[x] = value.to_bytes(SHARE)
    return found


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret; a ValueError for too few shares, or for shares that do not belong together."""
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares, and {threshold} are needed")
    first, others = sorted(shares)[:threshold], sorted(shares)[threshold:]
    values = [int.from_bytes(shares[x]) for x in first]

    def at(x: int) -> int:
        weights = _weights(tuple(first), x)
        return sum(w * value for w, value in zip(weights, values, strict=True)) % PRIME

    if any(at(x) != int.from_bytes(shares[x]) for x in others) or at(0) >= 2 ** (8 * SECRET):
        raise ValueError("shares that do not belong together")
    return at(0).to_bytes(SECRET)


@lru_cache(maxsize=4096)
def _weights(places: tuple[int, ...], x: int) -> list[int]:
    """Lagrange's weights of the values at `places` in the value at `x`."""
    found = []
    for i in places:
        above = below = 1
        for j in places:
            if j != i:
                above, below = above * (x - j) % PRIME, below * (i - j) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found
