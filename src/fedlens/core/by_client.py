"""An immutable dict keyed by client: a change returns a new dict and copies only a small part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

V = TypeVar("V")

BITS = 7  # of a client's number: a leaf holds 2^7 clients, a branch 2^7 leaves

Leaf = dict[int, V]
Branch = dict[int, Leaf[V]]


class ByClient(Mapping[int, V], Generic[V]):
    """A value for each of some clients, in leaves that two such dicts share if they are equal."""

    def __init__(self, entries: Mapping[int, V] | None = None) -> None:
        self._branches: dict[int, Branch[V]] = {}
        self._count = 0
        if entries:
            changed = ByClient[V]().changed(entries)
            self._branches, self._count = changed._branches, changed._count

    def changed(self, entries: Mapping[int, V]) -> ByClient[V]:
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

    def __getitem__(self, client: int) -> V:
        try:
            return self._branches[client >> 2 * BITS][client >> BITS][client]
        except KeyError:
            raise KeyError(client) from None

    def __iter__(self) -> Iterator[int]:
        for branch in self._branches.values():
            for leaf in branch.values():
                yield from leaf

    def __len__(self) -> int:
        return self._count
