"""A round of secure sums in this process, with sites that are lost at any stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedlens.algorithm.secure import enough
from fedlens.fleet.secure.protocol import (
    Keys,
    Member,
    Opened,
    Round,
    Sign,
    is_signed,
    signed_by,
    trimmed,
    unmasked,
)

NOBODY: Mapping[str, Collection[int]] = {}


@cache
def key_of(site: int) -> ec.EllipticCurvePrivateKey:
    """The long-term key of a site; those below 0 are others', whom nobody knows."""
    return ec.generate_private_key(ec.SECP384R1())


def sign(site: int) -> Sign:
    return signed_by(key_of(site))


def verify(site: int, message: bytes, signature: bytes) -> bool:
    return is_signed(key_of(site).public_key(), message, signature)


def asked(count: int, about: str = "round 1", bits: int = 32) -> Round:
    return Round(about, tuple(range(count)), enough(2 / 3, count), bits)


class Sum:
    """An honest server. `lost` are the sites that are lost in a stage, before they answer."""

    def __init__(self, numbers: Mapping[int, Any], lost: Mapping[str, Collection[int]] = NOBODY,
                 bits: int = 32) -> None:  # fmt: skip
        self.round = asked(len(numbers), bits=bits)
        self.numbers, self.lost = numbers, lost
        self.members: dict[int, Member] = {}
        self.keys: dict[int, Keys] = {}
        self.sealed: dict[int, dict[int, bytes]] = {}
        self.masked: dict[int, Any] = {}
        self.signatures: dict[int, bytes] = {}
        self.opened: dict[int, Opened] = {}

    def there(self, sites: Collection[int], stage: str) -> list[int]:
        return [site for site in sites if site not in self.lost.get(stage, ())]

    def begin(self) -> Sum:
        for site in self.there(self.round.sites, "begin"):
            self.members[site], self.keys[site] = Member.begin(self.round, site, sign(site))
        return self

    def share(self) -> Sum:
        for site in self.there(self.keys, "share"):
            self.members[site], self.sealed[site] = self.members[site].share(self.keys, verify)
        return self

    def sealed_for(self, site: int) -> dict[int, bytes]:
        return {sender: each[site] for sender, each in self.sealed.items() if sender != site}

    def mask(self) -> Sum:
        for site in self.there(self.sealed, "mask"):
            self.members[site], self.masked[site] = self.members[site].mask(
                np.array(self.numbers[site], np.int64), self.sealed_for(site)
            )
        return self

    def agree(self) -> Sum:
        for site in self.there(self.masked, "agree"):
            self.members[site], self.signatures[site] = self.members[site].agree(
                self.masked, sign(site)
            )
        return self

    def open(self) -> Sum:
        for site in self.there(self.signatures, "open"):
            self.members[site], self.opened[site] = self.members[site].open(self.signatures, verify)
        return self

    def result(self) -> Any:
        total = trimmed(sum(self.masked.values()), self.round)
        return unmasked(total, self.round, self.keys, self.sealed, self.masked, self.opened)

    def run(self) -> Any:
        return self.begin().share().mask().agree().open().result()
