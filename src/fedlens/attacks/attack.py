"""An attack: who is hostile, and what these clients do to their data or to what they send.

A client that attacks by what it sends is the server's business alone: `Attacked` stands around the
algorithm's `combine`, which then has all uploads at once, and puts what the attack sends in place
of what hostile clients have trained. So an attack that knows all honest updates needs no second
training, and comes after whatever clients do to their uploads: it can send anything. Only the
parameters are changed: buffers, such as BatchNorm's statistics, are those that were trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.algorithm.slots import Combine, Received
from fedlens.core import Memory, Tree, keys
from fedlens.core.federation import Examples
from fedlens.core.trees import moved
from fedlens.network.layout import Layout

MEMORY = "attack"  # its place in what the server remembers of `combine`
HOSTILE = keys.purpose("hostile")

Clients = float | tuple[int, ...]
"""Who is hostile: a share of all clients, how many, or their numbers."""


class Seen(NamedTuple):
    """What an attack knows of a round; trees have parameters alone."""

    honest: Tree  # [H, ...] the updates of the honest clients
    own: Tree  # [M, ...] what the hostile ones would have sent
    key: Tensor  # [] of this round and purpose
    defence: Callable[[Tree], Tree]  # the combined update [...] if they send this [M, ...]

    @property
    def num_clients(self) -> int:
        return sum(len(next(iter(tree.values()))) for tree in (self.honest, self.own))


class Sending(Protocol):
    """An attack on what is sent."""

    def init(self, params: Tree) -> Tree:
        """What it remembers before the first round."""
        return {}

    def __call__(self, seen: Seen) -> Tree:
        """What the hostile clients send, [M, ...], or [1, ...] if all send the same."""
        raise AssertionError(f"{type(self).__name__} is called by `update`, or has neither")

    def update(self, seen: Seen, memory: Tree) -> tuple[Tree, Tree]:
        """The same, and what to remember. If it is defined, it alone is called."""
        return self(seen), memory


class Data(Protocol):
    """An attack on data."""

    def poisoned(self, examples: Examples, num_classes: int, key: Tensor) -> Examples:
        """The examples of a hostile client as it trains on them; new tensors."""
        ...

    def tests(self, tests: Examples, num_classes: int) -> Examples | None:
        """Test examples labelled as the attack wants them, by which its success is measured."""
        return None


@dataclass(frozen=True)
class Attack:
    """Hostile clients, the same in all rounds unless `redraw`, and what they do."""

    clients: Clients
    redraw: bool = False
    sending: Sending | None = None
    data: Data | None = None
    spared: int | None = None  # a client that is never drawn as hostile: `fltrust` trusts it

    def count(self, num_clients: int) -> int:
        """How many clients are hostile."""
        given = self.clients
        if isinstance(given, tuple):
            wrong = [one for one in given if not 0 <= one < num_clients]
            if wrong or not given or len({*given}) < len(given):
                raise ValueError(
                    f"attack.clients is {[*given]}: give different numbers from 0 to "
                    f"{num_clients - 1}"
                )
            if self.spared in given:
                raise ValueError(
                    f"attack.clients has {self.spared}, whom fltrust trusts: choose another root"
                )
            return len(given)
        count = max(round(given * num_clients), 1) if 0 < given < 1 else int(given)
        if not (given > 0 and (given < 1 or given == count) and count <= num_clients):
            raise ValueError(
                f"attack.clients is {given:g}: give a share below 1, or a number from 1 to "
                f"{num_clients}, the clients"
            )
        return count

    def hostile(self, num_clients: int, key: Tensor) -> Tensor:  # [K] bool
        """Which clients are hostile; the key draws them if they are not named."""
        count, found = self.count(num_clients), torch.zeros(num_clients, dtype=torch.bool)
        if isinstance(self.clients, tuple):
            chosen = torch.tensor(self.clients)
        else:
            order = keys.fold(key, torch.arange(num_clients)).argsort(stable=True)
            chosen = (
                order[order != self.spared][:count] if self.spared is not None else order[:count]
            )
        found[chosen] = True
        return found


def hostile_key(seed: int) -> Tensor:
    return keys.root(seed, HOSTILE)


@dataclass(frozen=True)
class Attacked(Combine):
    """`inner` of what arrives when hostile clients send what the attack says."""

    inner: Combine
    attack: Attack
    seed: int

    @property
    def fewest(self) -> int:
        return self.inner.fewest

    def withstands(self, clients: int) -> int | None:
        return self.inner.withstands(clients)

    def check(self, layout: Layout) -> None:
        self.inner.check(layout)

    def init(self, params: Tree) -> Memory:
        assert self.attack.sending is not None
        mine = self.attack.sending.init(params)
        return {**self.inner.init(params), **({MEMORY: mine} if mine else {})}

    def update(self, given: Received) -> tuple[Tree, Memory]:
        attack, cohort, key = self.attack, given.cohort, given.key
        updates, memory = given.updates, given.memory
        assert attack.sending is not None
        drawn_by = keys.fold(key, HOSTILE) if attack.redraw else hostile_key(self.seed)
        hostile = attack.hostile(cohort.num_clients, drawn_by)[cohort.clients]  # [C]
        mine, rest = memory.get(MEMORY, {}), {n: t for n, t in memory.items() if n != MEMORY}
        rows = [one.nonzero().squeeze(1) for one in (hostile, ~hostile)]
        bad, good = moved(rows, given.shares.device)
        if len(bad):
            params = {n: u for n, u in updates.items() if given.layout.entries[n].role != "buffer"}
            own = {n: u[bad] for n, u in params.items()}
            honest = {n: u[good] for n, u in params.items()} if len(good) else own

            def arriving(sent: Tree) -> Tree:
                return updates | {
                    n: params[n].index_copy(0, bad, t.to(params[n]).expand(len(bad), *t.shape[1:]))
                    for n, t in sent.items()
                }

            def defence(sent: Tree) -> Tree:
                made = self.inner.update(given._replace(updates=arriving(sent), memory=rest))
                return {n: made[0][n] for n in params}

            seen = Seen(honest, own, keys.fold(key, keys.purpose("attack")), defence)
            sent, mine = attack.sending.update(seen, mine)
            updates = arriving(sent)
        combined, rest = self.inner.update(given._replace(updates=updates, memory=rest))
        return combined, {**rest, **({MEMORY: mine} if mine else {})}


def under_attack(base: Algorithm, attack: Attack, seed: int) -> Algorithm:
    """The algorithm as it is when some clients attack by what they send."""
    if attack.sending is None:
        return base
    return replace(base, combine=Attacked(base.combine, attack, seed))
