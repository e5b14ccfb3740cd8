"""Secure sums (Bonawitz et al., CCS 2017), with double masks, against a server that may lie.

A round has five stages, in each of which sites may be lost:

1. `begin`: every site makes two key pairs for this round, and signs the public keys.
2. `share`: it splits the key and the seed of its masks among all sites, sealed for each of them.
3. `mask`: it sends its numbers plus a mask from its seed, plus a mask with every other site that
   one of the two adds and the other subtracts.
4. `agree`: it signs which sites' numbers have arrived.
5. `open`: once enough sites have signed the same, it gives its share of the seeds of these sites,
   and of the keys of sites whose numbers are missing: never both of one site.

With them the server takes off the masks that are left in the sum (`unmasked`). It never has both
masks of one site, unless a third of the sites or more join its lie.

All that sites must have in common (the experiment, the round, the model, who was asked) is in
`Round`, whose digest is in every signature and every key: a site that was told something else takes
part in another sum. A `Member` is what a site remembers from stage to stage, as plain values.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedlens.algorithm.secure import FEWEST
from fedlens.fleet.secure import shamir

Numbers = np.ndarray[Any, Any]
Sign = Callable[[bytes], bytes]  # by a site's long-term key
Verify = Callable[[int, bytes, bytes], bool]
"""Whether a message has the signature of a site, by its long-term key."""
SIGNED = ec.ECDSA(hashes.SHA384())


class Unsafe(Exception):
    """A site does not go on: what it is asked could show more of a site than the sum does."""


@dataclass(frozen=True)
class Round:
    """What all sites of a sum must have in common."""

    about: str  # the digest of the experiment, its round, the model, the attempt
    sites: tuple[int, ...]  # that are asked, in order
    threshold: int  # how many of them must stay until the end
    bits: int

    @cached_property
    def digest(self) -> bytes:
        told = repr((self.about, self.sites, self.threshold, self.bits))
        return hashlib.sha256(told.encode()).digest()

    @property
    def fewest(self) -> int:
        """How many sites a sum must have."""
        return max(self.threshold, FEWEST)

    @property
    def word(self) -> Any:
        return np.uint32 if self.bits <= 32 else np.uint64

    def check(self, sites: Iterable[int], known: Iterable[int], me: int) -> tuple[int, ...]:
        """These sites in order; Unsafe unless they are enough of the known, with this one."""
        listed = tuple(sorted(sites))
        if not set(listed) <= set(known) or len(set(listed)) != len(listed):
            raise Unsafe(f"its cohort changed: {listed} of {tuple(sorted(known))}")
        if me not in listed:
            raise Unsafe(f"site {me} is left out, and asked to go on")
        if len(listed) < self.fewest:
            raise Unsafe(f"{len(listed)} sites are left, and {self.fewest} are the fewest")
        return listed

    def place(self, site: int) -> int:
        return self.sites.index(site) + 1


class Keys(NamedTuple):
    """The public keys of a site for one round, signed by its long-term key."""

    sealing: bytes
    masking: bytes
    signature: bytes


class Opened(NamedTuple):
    """A site's shares: of the seeds of sites in the sum, and of the keys of those that are lost."""

    seeds: dict[int, bytes]
    keys: dict[int, bytes]


@dataclass(frozen=True)
class Member:
    """A site in a round. Each stage returns the member after it, and what is sent.

    `secret` is all of its randomness for the round but that of the shares. No stage is done twice.
    """

    round: Round
    site: int
    secret: bytes
    stage: str = "begun"  # shared, masked, agreed, opened
    keys: Mapping[int, Keys] = field(default_factory=dict)  # of all sites that began
    shares: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Its shares of the seed and of the masking key of each site."""
    survivors: tuple[int, ...] = ()

    @classmethod
    def begin(cls, round: Round, site: int, sign: Sign) -> tuple[Member, Keys]:
        if len(set(round.sites)) < FEWEST or tuple(sorted(set(round.sites))) != round.sites:
            raise Unsafe(f"{len(set(round.sites))} sites are asked, and {FEWEST} are the fewest")
        if 3 * round.threshold < 2 * len(round.sites):
            raise Unsafe(f"{round.threshold} of {len(round.sites)} are fewer than two thirds")
        me = cls(round, site, os.urandom(shamir.SECRET))
        sealing, masking = (_public(me._key(name)) for name in ("sealing", "masking"))
        return me, Keys(sealing, masking, sign(about_keys(round, site, sealing, masking)))

    def share(self, keys: Mapping[int, Keys], verify: Verify) -> tuple[Member, dict[int, bytes]]:
        """Shares for every other site."""
        self.check_stage("begun")
        listed = self.round.check(keys, self.round.sites, self.site)
        for site, own in keys.items():
            check_keys(self.round, site, own, verify)
        mine = tuple(_public(self._key(name)) for name in ("sealing", "masking"))
        if keys[self.site][:2] != mine:
            raise Unsafe("its own keys were replaced")
        places = {site: self.round.place(site) for site in listed}
        split = [
            shamir.split(secret, self.round.threshold, places.values())
            for secret in (self._derived("seed"), self._derived("masking"))
        ]
        shares = {site: (split[0][place], split[1][place]) for site, place in places.items()}
        sealed = {
            site: self._seal(keys[site], self.site, site).encrypt(NONCE, b"".join(both), None)
            for site, both in shares.items()
            if site != self.site
        }
        kept = {self.site: shares[self.site]}
        return replace(self, stage="shared", keys=dict(keys), shares=kept), sealed

    def mask(self, numbers: Numbers, sealed: Mapping[int, bytes]) -> tuple[Member, Numbers]:
        """Its whole numbers [n] with masks; `sealed` are the shares that others have for it."""
        self.check_stage("shared")
        listed = self.round.check([*sealed, self.site], self.keys, self.site)
        shares = dict(self.shares)
        for site, content in sealed.items():
            try:
                both = self._seal(self.keys[site], site, self.site).decrypt(NONCE, content, None)
            except InvalidTag as error:
                raise Unsafe(f"the shares of site {site} were changed") from error
            shares[site] = both[: shamir.SHARE], both[shamir.SHARE :]
        masked = numbers.astype(self.round.word)
        masked += generated(self._derived("seed"), self.round, len(numbers))
        for site in listed:
            if site != self.site:
                own = self._key("masking"), self.keys[site].masking
                add_mask(masked, self.round, own, self.site, site)
        return replace(self, stage="masked", shares=shares), trimmed(masked, self.round)

    def agree(self, survivors: Iterable[int], sign: Sign) -> tuple[Member, bytes]:
        """Its signature that the numbers of these sites, and no others, are in the sum."""
        self.check_stage("masked")
        listed = self.round.check(survivors, self.shares, self.site)
        return replace(self, stage="agreed", survivors=listed), sign(about_sum(self.round, listed))

    def open(self, signatures: Mapping[int, bytes], verify: Verify) -> tuple[Member, Opened]:
        """Its shares of what is left in the sum; the member after it remembers nothing."""
        self.check_stage("agreed")
        signed = about_sum(self.round, self.survivors)
        for site, signature in signatures.items():
            if site not in self.survivors or not verify(site, signed, signature):
                raise Unsafe(f"site {site} did not sign for the same sum")
        if len(signatures) < self.round.threshold:
            raise Unsafe(
                f"{len(signatures)} sites have signed, and {self.round.threshold} are needed"
            )
        there, lost = self.survivors, self.shares.keys() - set(self.survivors)
        opened = Opened(
            {site: self.shares[site][0] for site in there},
            {site: self.shares[site][1] for site in sorted(lost)},
        )
        return replace(self, stage="opened", secret=b"", shares={}), opened

    def plain(self) -> dict[str, Any]:
        """Itself, as JSON has it."""
        return {
            "round": asdict(self.round),
            "site": self.site,
            "secret": self.secret.hex(),
            "stage": self.stage,
            "keys": {site: hexed(keys) for site, keys in self.keys.items()},
            "shares": {site: hexed(both) for site, both in self.shares.items()},
            "survivors": self.survivors,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Member:
        """The member that `plain` was made of."""
        round = plain["round"]
        shares = {int(site): unhexed(both) for site, both in plain["shares"].items()}
        return cls(
            Round(**{**round, "sites": tuple(round["sites"])}),
            plain["site"],
            bytes.fromhex(plain["secret"]),
            plain["stage"],
            {int(site): Keys(*unhexed(keys)) for site, keys in plain["keys"].items()},
            {site: (seed, key) for site, (seed, key) in shares.items()},
            tuple(plain["survivors"]),
        )

    def check_stage(self, stage: str) -> None:
        if self.stage != stage:
            raise Unsafe(f"it is asked twice, or out of turn: it has {self.stage} in this round")

    def _derived(self, name: str) -> bytes:
        return _key_for(self.secret, self.round, name)

    def _key(self, name: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._derived(name))

    def _seal(self, other: Keys, sender: int, receiver: int) -> ChaCha20Poly1305:
        common = _exchanged(self._key("sealing"), other.sealing)
        return ChaCha20Poly1305(_key_for(common, self.round, f"seal {sender} {receiver}"))


NONCE = bytes(12)  # every key seals once


def unmasked(
    total: Numbers,
    round: Round,
    keys: Mapping[int, Keys],
    shared: Iterable[int],
    survivors: Iterable[int],
    opened: Mapping[int, Opened],
) -> Numbers:  # [n] int64
    """The sum of the survivors' numbers, from the sum of what they sent.

    `shared` are all sites whose shares were passed on, `opened` what each that stayed has opened. A
    ValueError if their shares do not belong together: one of them lies.
    """
    total, survivors = total.copy(), sorted(survivors)
    for site in survivors:
        shares = {round.place(one): each.seeds[site] for one, each in opened.items()}
        total -= generated(shamir.join(shares, round.threshold), round, len(total))
    for lost in set(shared) - set(survivors):
        shares = {round.place(one): each.keys[lost] for one, each in opened.items()}
        key = X25519PrivateKey.from_private_bytes(shamir.join(shares, round.threshold))
        if _public(key) != keys[lost].masking:
            raise ValueError("shares that do not belong together")
        for site in survivors:
            add_mask(total, round, (key, keys[site].masking), lost, site)
    below = trimmed(total, round).astype(np.int64)
    half = 1 << (round.bits - 1)
    return below - ((below >= half).astype(np.int64) << round.bits)


def hexed(parts: Iterable[bytes]) -> list[str]:
    return [part.hex() for part in parts]


def unhexed(parts: Iterable[str]) -> list[bytes]:
    return [bytes.fromhex(part) for part in parts]


def trimmed(words: Numbers, round: Round) -> Numbers:
    """The words modulo 2^bits."""
    below: Numbers = words & round.word((1 << round.bits) - 1)
    return below


def add_mask(
    words: Numbers, round: Round, agreed: tuple[X25519PrivateKey, bytes], site: int, other: int
) -> None:
    """Add to the words the mask that `site` has with another one: the other's is its negative."""
    mask = generated(_key_for(_exchanged(*agreed), round, "mask"), round, len(words))
    if site < other:
        words += mask
    else:
        words -= mask


def generated(key: bytes, round: Round, count: int) -> Numbers:
    """`count` random words from a key, by ChaCha20."""
    zeros = bytes(count * np.dtype(round.word).itemsize)
    made = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(zeros)
    return np.frombuffer(made, round.word)


def _exchanged(own: X25519PrivateKey, other: bytes) -> bytes:
    try:
        common: bytes = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:  # such as zeros
        raise Unsafe("a public key is none") from error
    return common


def _key_for(secret: bytes, round: Round, purpose: str) -> bytes:
    info = b"fedlens secure sum " + purpose.encode()
    made = HKDF(hashes.SHA256(), shamir.SECRET, salt=round.digest, info=info)
    key: bytes = made.derive(secret)
    return key


def _public(key: X25519PrivateKey) -> bytes:
    raw: bytes = key.public_key().public_bytes_raw()
    return raw


def check_keys(round: Round, site: int, keys: Keys, verify: Verify) -> None:
    """Raise Unsafe unless a site has signed these keys for this round, and they are keys."""
    if not verify(site, about_keys(round, site, keys.sealing, keys.masking), keys.signature):
        raise Unsafe(f"the keys of site {site} are not signed by it for this round")
    for public in keys[:2]:
        _exchanged(X25519PrivateKey.generate(), public)


def about_keys(round: Round, site: int, sealing: bytes, masking: bytes) -> bytes:
    """What a site signs about its keys."""
    return (
        b"fedlens secure sum: keys " + round.digest + str(site).encode() + b" " + sealing + masking
    )


def about_sum(round: Round, survivors: tuple[int, ...]) -> bytes:
    """What a site signs about a sum."""
    return b"fedlens secure sum: of " + round.digest + repr(survivors).encode()


def signed_by(key: ec.EllipticCurvePrivateKey) -> Sign:
    """What signs with a site's long-term key."""
    return lambda message: key.sign(message, SIGNED)


def is_signed(key: ec.EllipticCurvePublicKey, message: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, message, SIGNED)
    except InvalidSignature:
        return False
    return True
