"""An immutable dict keyed by client: a change returns a new dict and copies only a small part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

V = TypeVar("V")

BITS = 7  # of a client's number: a leaf holds 2^7 clients, a branch 2^7 leaves


@dataclass(frozen=True)
class Elsewhere(Generic[V]):
    """A value that is not in memory: it is read each time that it is asked for."""

    read: Callable[[], V]
    described: Any  # by plain values: where a checkpoint finds it


Leaf = dict[int, V | Elsewhere[V]]
Branch = dict[int, Leaf[V]]


class ByClient(Mapping[int, V], Generic[V]):
    """A value for each of some clients, in leaves that two such dicts share if they are equal."""

    def __init__(self, entries: Mapping[int, V | Elsewhere[V]] | None = None) -> None:
        self._branches: dict[int, Branch[V]] = {}
        self._count = 0
        if entries:
            changed = ByClient[V]().changed(entries)
            self._branches, self._count = changed._branches, changed._count

    def changed(self, entries: Mapping[int, V | Elsewhere[V]]) -> ByClient[V]:
        """A new dict with these entries set: the cost grows with them, hardly with all clients."""
        made: ByClient[V] = ByClient()
        made._branches, made._count = dict(self._branches), self._count
        own_branches: dict[int, Branch[V]] = {}  # copied for `made`, so that they
        own_leaves: dict[int, Leaf[V]] = {}  # may be written to
        for client, value in entries.items():
            far, near = client >> 2 * BITS, client >> BITS
            if far not in own_branches:
                own_branches[far] = made._branches[far] = dict(made._branches.get(far, {}))
            branch = own_branches[far]
            if near not in own_leaves:
                own_leaves[near] = branch[near] = dict(branch.get(near, {}))
            leaf = own_leaves[near]
            made._count += client not in leaf
            leaf[client] = value
        return made

    def _entry(self, client: int) -> V | Elsewhere[V]:
        try:
            return self._branches[client >> 2 * BITS][client >> BITS][client]
        except KeyError:
            raise KeyError(client) from None

    def __getitem__(self, client: int) -> V:
        entry = self._entry(client)
        return entry.read() if isinstance(entry, Elsewhere) else entry

    def __contains__(self, client: object) -> bool:
        try:
            return isinstance(client, int) and self._entry(client) is not None
        except KeyError:
            return False

    @property
    def elsewhere(self) -> dict[int, Elsewhere[V]]:
        """The entries that are not in memory."""
        entries = ((client, self._entry(client)) for client in self)
        return {client: entry for client, entry in entries if isinstance(entry, Elsewhere)}

    def __iter__(self) -> Iterator[int]:
        for branch in self._branches.values():
            for leaf in branch.values():
                yield from leaf

    def __len__(self) -> int:
        return self._count
