"""A site's half of a secure sum: what it answers, stage by stage, and what it keeps on its disk.

Each order is answered by another process, so a `Member` waits in a file for the next one. What a
site has opened stays written down: it opens one sum a round, for the difference of two sums would
show the sites that are in one of them alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedlens.algorithm import Algorithm
from fedlens.algorithm.secure import SecureSum, enough
from fedlens.config.options import check
from fedlens.config.sections import Reporting
from fedlens.core import Tree
from fedlens.core.bits import to_bits
from fedlens.fleet import NODE_KEY, payload
from fedlens.fleet.keys import as_text, site_key
from fedlens.fleet.policy import Refused
from fedlens.fleet.secure.protocol import (
    Keys,
    Member,
    Round,
    Unsafe,
    hexed,
    is_signed,
    signed_by,
    unhexed,
)
from fedlens.fleet.terms import Terms
from fedlens.rounds.uploads import MEASURED, NORM, PEAK
from fedlens.rounds.work import Part, Work
from fedlens.storage.files import write_atomically
from fedlens.storage.locks import one_writer

T = TypeVar("T")

BY_CLIENT = ("clients", "sizes", "steps", "size_shares")  # of a cohort


@dataclass(frozen=True)
class Told:
    """What the server tells all sites of a sum alike; all of it is in every signature and key."""

    experiment: str  # the hash of its terms, which have the keys of all sites
    round: int
    model: str  # the digest of all tensors that they are sent
    sites: tuple[int, ...]  # that are asked
    examples: int  # that they hold together
    counted: int  # the examples that `weigh` counts on
    attempt: str

    def round_of(self, threshold: float, bits: int) -> Round:
        return Round(repr(self), self.sites, enough(threshold, len(self.sites)), bits)


@dataclass(frozen=True)
class Sums:
    """The sums of an experiment at a site, whose place among all sites is `number`."""

    home: Path
    terms: Terms
    number: int
    approved: str  # when; another approval allows another run

    @property
    def folder(self) -> Path:
        return self.home / "memory" / self.terms.hash / "sums"

    def answer(self, stage: str, order: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to an order without tensors."""
        stages = {"keys": self._keys, "shares": self._shares, "agree": self._agree}
        with one_writer(self.folder):
            return {**stages, "open": self._open}[stage](order)

    def _keys(self, order: Mapping[str, Any]) -> dict[str, Any]:
        told = _read(lambda: check(order["sum"], Told, "sum"))
        if (told.experiment, told.round) != (self.terms.hash, order.get("round")):
            raise Unsafe("its order contradicts itself")
        if not 0 <= told.round < self.terms.rounds:
            raise Unsafe(f"round {told.round} is none of {self.terms.rounds}")
        if len(told.sites) != self.terms.cohort or not set(told.sites) <= self._all.keys():
            raise Unsafe(
                f"it was asked for a sum of the sites {told.sites}, and approved those of "
                f"{self.terms.cohort} sites of {len(self._all)}"
            )
        if as_text(self._own.public_key()) != self._all.get(self.number):
            raise Unsafe("the key in its place is another's")
        sums = self.terms.algorithm.combine
        assert isinstance(sums, SecureSum)
        round = told.round_of(sums.threshold, sums.bits)
        member, keys = Member.begin(round, self.number, self._sign)
        self._write(told, member)
        return {"keys": hexed(keys), "opened": self._opened.get(str(told.round))}

    def _shares(self, order: Mapping[str, Any]) -> dict[str, Any]:
        told, member = self._waiting()
        keys = _read(lambda: {int(k): Keys(*unhexed(each)) for k, each in order["keys"].items()})
        member, sealed = member.share(keys, self._verify)
        self._write(told, member)
        return {"sealed": {site: content.hex() for site, content in sealed.items()}}

    def _agree(self, order: Mapping[str, Any]) -> dict[str, Any]:
        told, member = self._waiting()
        survivors = _read(lambda: [*map(int, order["survivors"])])
        before = self._opened.get(str(told.round))
        if before is not None and before != sorted(survivors):
            raise Unsafe(
                f"in round {told.round} it has opened the sum of {before}, and with that of "
                f"{sorted(survivors)} the difference would show"
            )
        member, signature = member.agree(survivors, self._sign)
        self._write(told, member)
        return {"signature": signature.hex()}

    def _open(self, order: Mapping[str, Any]) -> dict[str, Any]:
        told, member = self._waiting()
        given = _read(lambda: {int(k): bytes.fromhex(v) for k, v in order["signatures"].items()})
        after, opened = member.open(given, self._verify)
        content = {**self._opened, str(told.round): member.survivors}
        text = json.dumps({"approved": self.approved, "sums": content})
        write_atomically(self.folder / "opened.json", text.encode())
        self._write(told, after)
        return {
            name: {k: v.hex() for k, v in each.items()} for name, each in opened._asdict().items()
        }

    def begun(self, round: int, model: str) -> Told:
        """What all sites were told of the sum that a site now trains for."""
        told, member = self._waiting()
        member.check_stage("shared")
        if (told.round, told.model) != (round, model):
            raise Unsafe("it is sent another model or another round than all sites were told")
        return told

    def masked(self, numbers: Tree, order: Mapping[str, Any]) -> Tree:
        """Its whole numbers with masks, as they travel."""
        given = _read(lambda: {int(k): bytes.fromhex(v) for k, v in order["sealed"].items()})
        words = np.concatenate([t.numpy().ravel() for _, t in sorted(numbers.items())])
        with one_writer(self.folder):
            told, member = self._waiting()
            member, words = member.mask(words, given)
            self._write(told, member)
        return {"masked": to_bits(torch.from_numpy(words.astype(np.int64)), member.round.bits)}

    @property
    def _all(self) -> dict[int, str]:
        """The keys of all sites."""
        return {one.number: one.key for one in self.terms.content.sites}

    @cached_property
    def _own(self) -> Any:
        return load_ssh_private_key((self.home / NODE_KEY).read_bytes(), None)

    def _sign(self, message: bytes) -> bytes:
        return signed_by(self._own)(message)

    def _verify(self, site: int, message: bytes, signature: bytes) -> bool:
        return is_signed(site_key(self._all[site]), message, signature)

    @property
    def _opened(self) -> dict[str, list[int]]:
        """The sites of the sums that it has opened, by round, since it was last approved."""
        path = self.folder / "opened.json"
        if not path.is_file():
            return {}
        content = json.loads(path.read_bytes())
        return dict(content["sums"]) if content["approved"] == self.approved else {}

    def _waiting(self) -> tuple[Told, Member]:
        path = self.folder / "member.json"
        if not path.is_file():
            raise Unsafe("it has begun no sum")
        content = json.loads(path.read_bytes())
        return check(content["told"], Told, str(path)), Member.of(content["member"])

    def _write(self, told: Told, member: Member) -> None:
        content = {"told": asdict(told), "member": member.plain()}
        write_atomically(self.folder / "member.json", json.dumps(content).encode())


def _read(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused("its order is not of the right form") from error


def in_sum(algorithm: Algorithm, told: Told, work: Work) -> Work:
    """The work of a single client with its share in the sum, as the server would know it."""
    cohort, size = work.cohort, int(work.cohort.sizes)
    if told.examples < size:
        raise Unsafe(f"all sites together would have {told.examples} examples, and it has {size}")
    shares = cohort.sizes.double() / told.examples
    cohort = cohort._replace(size_shares=shares, num_examples=told.counted)
    like = {name: getattr(cohort, name).expand(len(told.sites)) for name in BY_CLIENT}
    shares = algorithm.weigh(cohort._replace(**like))[:1].double()
    return replace(work, shares=shares, cohort=cohort, cohort_sizes=(len(told.sites),))


def check_part(part: Part, algorithm: Algorithm, rules: Reporting | None) -> float:
    """The norm of an update; Refused if there is no place for it in a sum."""
    secure = algorithm.combine
    assert isinstance(secure, SecureSum)
    norm = float(part.scalars[NORM])
    why = secure.refused(float(part.scalars[PEAK])) or (rules or Reporting()).rejects(norm)
    if why is not None:
        raise Refused(f"it would send what has no place in a sum: {why}")
    return norm


def whole_numbers(part: Part, covered: bool) -> Tree:
    """The sums of a part; measures have no noise, so they are no part of a sum with privacy."""
    extra = {n: tree for n, tree in part.extra.items() if not (covered and n == MEASURED)}
    return dict(sorted(payload.flat({"update": part.update, "extra": extra}).items()))
