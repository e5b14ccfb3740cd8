"""The server's half of a secure sum: five stages, in each of which sites may be lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from fedlens.algorithm.secure import SecureSum
from fedlens.core import Memory, Tree
from fedlens.core.bits import from_bits
from fedlens.fleet import payload
from fedlens.fleet.payload import Reply
from fedlens.fleet.secure.protocol import (
    Keys,
    Numbers,
    Opened,
    Round,
    Verify,
    about_sum,
    check_keys,
    trimmed,
    unhexed,
    unmasked,
)
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.uploads import MEASURED
from fedlens.rounds.work import Part, Work

T = TypeVar("T")
Orders = Mapping[int, Mapping[str, Any]]
Ask = Callable[[str, Orders, Tree, Callable[[int, Reply], T]], dict[int, T]]
"""Asks sites, each with its own order and all with the same tensors; what those that answered well
sent, as a function reads it, which raises an error for all else. Sites by their numbers."""


class Below(Exception):
    """Fewer sites are left than a sum needs; nothing of what they sent can be read."""


@dataclass
class Summing:
    """A sum, as far as it has come."""

    ask: Ask[Any]
    round: Round
    verify: Verify
    least: int  # sites whose numbers must arrive
    count: int  # of numbers
    there: Collection[int] = ()  # the sites that are in the sum, as far as it has come
    kept: set[int] = field(default_factory=set)  # those that keep a memory of this round

    def run(self, told: Mapping[str, Any], orders: Orders, model: Tree) -> Numbers:
        """The sum; Below if too few sites stay, a ValueError if one of them lies."""
        common = {"sum": told}
        begun = self._stage("keys", dict.fromkeys(orders, common), self._keys)
        listed: dict[int, Any] = {site: answer["keys"] for site, answer in begun.items()}
        given: dict[int, Any] = {site: {"keys": listed} for site in begun}
        sealed: dict[int, Any] = self._stage("shares", given, partial(_sealed, {*begun}))
        shared = {*sealed}
        given = {
            site: {**orders[site], "sealed": {k: v[site] for k, v in sealed.items() if k != site}}
            for site in sealed
        }
        # A site opens one sum a round. If it has opened one before, it can be no other.
        before = {tuple(answer["opened"]) for answer in begun.values() if answer["opened"]}
        wanted = set(self.round.sites).intersection(*before)
        total = np.zeros(self.count, self.round.word)

        def add(site: int, reply: Reply) -> None:
            nonlocal total
            masked = reply.tensors.get("masked", torch.zeros(0))
            words = from_bits(masked, self.count, self.round.bits).numpy().astype(self.round.word)
            if site in wanted:
                total += words
                self.kept |= {site} if reply.facts.get("kept") else set()

        masked = self._stage("train", given, add, model, self.least)
        survivors = self.there = sorted(wanted & masked.keys())
        if before and {tuple(survivors)} != before:
            raise Below
        self._check(survivors, self.least)
        given = {site: {"survivors": survivors} for site in survivors}
        signed = self._stage("agree", given, partial(self._signature, tuple(survivors)))
        given = {site: {"signatures": signed} for site in signed}
        there = {*survivors}
        opened = self._stage("open", given, partial(_opened, there, shared - there))
        self.there = survivors
        keys = {site: Keys(*unhexed(each)) for site, each in listed.items()}
        return unmasked(trimmed(total, self.round), self.round, keys, sealed, survivors, opened)

    def _stage(
        self,
        what: str,
        orders: Orders,
        read: Callable[[int, Reply], T],
        tensors: Tree | None = None,
        least: int = 0,
    ) -> dict[int, T]:
        found = self.ask(what, orders, tensors or {}, read)
        self.there = sorted(found)
        self._check(found, least)
        return found

    def _check(self, sites: Collection[int], least: int) -> None:
        if len(sites) < max(least, self.round.fewest):
            raise Below

    def _keys(self, site: int, reply: Reply) -> dict[str, Any]:
        keys, opened = reply.facts["keys"], reply.facts.get("opened")
        check_keys(self.round, site, Keys(*unhexed(keys)), self.verify)
        return {"keys": keys, "opened": opened and [*map(int, opened)]}

    def _signature(self, survivors: tuple[int, ...], site: int, reply: Reply) -> str:
        signature = bytes.fromhex(reply.facts["signature"])
        if not self.verify(site, about_sum(self.round, survivors), signature):
            raise ValueError("it did not sign for this sum")
        return signature.hex()


def _sealed(begun: set[int], site: int, reply: Reply) -> dict[int, str]:
    return {k: v.hex() for k, v in _by_site(reply.facts["sealed"], begun - {site}).items()}


def _opened(there: set[int], lost: set[int], site: int, reply: Reply) -> Opened:
    return Opened(_by_site(reply.facts["seeds"], there), _by_site(reply.facts["keys"], lost))


def _by_site(parts: Mapping[str, str], sites: set[int]) -> dict[int, bytes]:
    found = {int(site): bytes.fromhex(part) for site, part in parts.items()}
    if found.keys() != sites:
        raise ValueError("it is of other sites than it was asked for")
    return found


class Summed(NamedTuple):
    """A secure sum, in whole numbers."""

    numbers: Numbers  # [n] int64
    form: Tree  # of its tensors
    like: Part  # of one client
    asked: Work
    rows: tuple[int, ...]  # of those asked: whose numbers are in it
    kept: Sequence[bool]  # which of these keep a memory of the round

    def part(self, program: ClientProgram, work: Work) -> Part:
        """What the clients of the sum send together; `work` is theirs.

        They have weighted their numbers by what is right if all that were asked stay.
        """
        secure, rows = program.algorithm.combine, list(self.rows)
        assert isinstance(secure, SecureSum)
        ends = [t.numel() for t in self.form.values()]
        split = torch.split(torch.from_numpy(self.numbers), ends)
        tree = {
            name: part.view(like.shape)
            for (name, like), part in zip(self.form.items(), split, strict=True)
        }
        parts: dict[str, Any] = {"update": {}, "extra": {}} | payload.nested(tree)
        asked, sizes = self.asked.shares[rows], self.asked.cohort.size_shares[rows]
        weight, of_mean = (
            float(now.sum() / then.sum())
            for now, then in ((work.shares, asked), (work.cohort.size_shares, sizes))
        )
        extra = {
            name: secure.opened(tree, len(self.asked))
            for name, tree in parts["extra"].items()
            if name != MEASURED
        }
        measured = parts["extra"].get(MEASURED, {})
        alike = len(self.asked) / len(work)
        extra[MEASURED] = {
            name: secure.opened({name: t}, alike if name in self.like.channel_scalars else of_mean)[
                name
            ]
            for name, t in measured.items()
        }
        keep: list[Memory] = [
            {"counted": {"key": key}} if kept else {}
            for key, kept in zip(work.keys.clone(), self.kept, strict=True)
        ]
        return Part(
            update=secure.opened(parts["update"], secure.total * weight),
            counters={},
            extra=extra,
            keep=keep,
            scalars={"loss": torch.zeros(len(work))},
            combined=True,
            borrowed=False,
        )
