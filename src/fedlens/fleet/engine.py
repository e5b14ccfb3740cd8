"""The engine of a fleet, whose clients are sites.

It sends orders, receives replies in any order, and checks each reply before it counts. Sites send
unweighted updates; they are weighted here, once it is known which sites have answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedlens.core import Memory, Tree
from fedlens.core.federation import Examples
from fedlens.engines import Sequential
from fedlens.fleet import payload
from fedlens.fleet.payload import Reply
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine, Unreported
from fedlens.rounds.reports import Reporting
from fedlens.rounds.uploads import norm_of
from fedlens.rounds.work import Part, Shared, Work

DEADLINE = 3600.0  # seconds, if the experiment sets none
AWAY = 90.0  # seconds to wait for an offline site: Flower refuses a site for 60 after it died
LARGEST = 1000.0  # times the norm of the model: of an update, if the experiment sets no limit
PAUSE = 0.25  # seconds between two polls for replies


class Sites(Protocol):
    """The connection to the sites; each site is identified by its client number."""

    def online(self) -> set[int]: ...

    def send(
        self, what: str, orders: Mapping[int, Mapping[str, Any]], tensors: Tree, seconds: float
    ) -> None:
        """Send each site its own order, and all of them the same tensors."""
        ...

    def arrived(self) -> list[tuple[int, Reply]]:
        """The replies since the last call."""
        ...

    def gone(self) -> set[int]:
        """Those that were withdrawn, and will not come back."""
        ...

    def forget(self) -> None:
        """Stop waiting for replies that have not arrived."""
        ...


@dataclass
class Fleet(Engine):
    """The engine of a fleet. `names`, `numbers` and `sizes` have a place for each client."""

    network: Network
    sites: Sites
    experiment: str  # its hash
    names: Sequence[str]
    numbers: Sequence[int]  # by which sites were approved
    sizes: Sequence[int]
    rules: Reporting
    notify: Callable[[str, str], None]  # called with the name of each site that failed, and why
    name: ClassVar[str] = "fleet"
    _answers: dict[int, Part] = field(default_factory=dict)  # of this round, by order key
    _away: set[int] = field(default_factory=set)  # sites that were offline for the whole wait
    _declared: Tree | None = None

    @property
    def reporting(self) -> Reporting:
        return self.rules

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        own_keys, clients = work.keys.tolist(), work.cohort.clients.tolist()
        self._answers = {key: self._answers[key] for key in own_keys if key in self._answers}
        rows: dict[int, list[int]] = {}
        for row, client in enumerate(clients):
            if own_keys[row] not in self._answers:
                rows.setdefault(client, []).append(row)
        failed = self._gather(program, shared, work, rows) if rows else {}
        if failed:
            raise Unreported(failed)
        algorithm = program.algorithm
        for row, key in enumerate(own_keys):
            part = self._answers.pop(key)  # `combine` may modify its input in place
            if algorithm.sums_parts:
                mine = work.rows(slice(row, row + 1))
                update = algorithm.combine(part.update, mine.shares, mine.cohort, program.layout)
                part = part._replace(update=update, combined=True)
            yield part

    def _gather(
        self, program: ClientProgram, shared: Shared, work: Work, rows: Mapping[int, list[int]]
    ) -> dict[int, str]:
        """Send orders and keep valid answers; return the rows without one, with the reason."""
        own_keys = work.keys.tolist()
        model = payload.flat(
            {"params": shared.params, "buffers": shared.buffers, "told": shared.told}
        )
        orders = {
            client: {
                "experiment": self.experiment,
                "client": self.numbers[client],
                "round": work.rounds[0],  # a site takes this round's values from the terms
                "size": self.sizes[client],
                "keys": [own_keys[row] for row in some],
                "counted": counted(work.memory[some[0]]),
            }
            for client, some in rows.items()
        }
        if self._declared is None:
            none = Examples(torch.zeros((1, 1, 1, 1), dtype=torch.uint8), torch.zeros(1).long())
            plain = Sequential(self.network, none)
            self._declared = payload.declared(replace(program, uncombined=True), plain, shared)
        algorithm, failed = program.algorithm, dict[int, str]()
        goal = min(algorithm.select.cohort_size, len(work))
        rules = self.rules
        needed = rules.needed(goal, algorithm.combine.fewest)
        if rules.largest is None:
            sent = norm_of([shared.params, shared.buffers], torch.zeros(1))
            rules = replace(rules, largest=LARGEST * max(float(sent.max()), 1.0))
        for client, arrived in self._ask("train", orders, model, goal, needed):
            own = [own_keys[row] for row in rows[client]]
            found = self._checked(arrived, own, rules, program, shared)
            if isinstance(found, dict):
                self._answers |= found
            else:
                failed |= dict.fromkeys(rows[client], found.failed or "malformed")
                self._say(client, found)
        missing = [row for some in rows.values() for row in some]
        enough = len(self._answers) >= goal
        for row in missing:
            if own_keys[row] not in self._answers and row not in failed:
                client = int(work.cohort.clients[row])
                away = client in self._away
                failed[row] = "surplus" if enough else "unavailable" if away else "late"
                if not enough:
                    self._say(client, Reply({}, {}, failed[row]))
        return failed

    def _ask(
        self,
        what: str,
        orders: Mapping[int, Mapping[str, Any]],
        tensors: Tree,
        goal: int,
        needed: int,
    ) -> Iterator[tuple[int, Reply]]:
        """Yield replies as they arrive, until all or enough have arrived or the time is over.

        An offline site gets its order when it comes back, if it comes back soon.
        """
        begun, last = time.monotonic(), self.rules.deadline or DEADLINE
        unsent, waiting = set(orders), set[int]()
        while unsent or waiting:
            passed = time.monotonic() - begun
            if passed > last or len(self._answers) >= goal:
                break
            online = self.sites.online() & unsent
            if online:
                some = {client: orders[client] for client in sorted(online)}
                self.sites.send(what, some, tensors, last - passed)
                unsent, waiting = unsent - online, waiting | online
                self._away -= online
            for client, arrived in self.sites.arrived():
                waiting.discard(client)
                yield client, arrived
            for client in sorted(self.sites.gone() & (unsent | waiting)):
                unsent, waiting = unsent - {client}, waiting - {client}
                yield client, Reply({}, {}, "unavailable", "it was withdrawn")
            if unsent and not waiting:
                # Only offline sites are left. If enough others answered, do not wait again for
                # sites that were offline before.
                known = unsent <= self._away and len(self._answers) >= needed
                if passed > AWAY or known:
                    break
            if unsent or waiting:
                time.sleep(PAUSE)
        self._away |= unsent
        self.sites.forget()

    def _checked(
        self,
        arrived: Reply,
        own_keys: list[int],
        rules: Reporting,
        program: ClientProgram,
        shared: Shared,
    ) -> dict[int, Part] | Reply:
        """The parts that a site sent, by order key, or an `Reply` that says what is wrong."""
        facts, declared = arrived.facts, self._declared
        assert declared is not None
        if arrived.failed is not None:
            return arrived
        if "refused" in facts:
            return arrived._replace(failed="refused", reason=str(facts["refused"]))
        if facts.get("experiment") != self.experiment:
            return arrived._replace(failed="foreign", reason="it is another experiment's")
        if facts.get("keys") != own_keys:
            return arrived._replace(failed="stale", reason="it is of another order")
        parts, asked = {}, 0
        for row, key in enumerate(own_keys):
            of_row = f"{row}/"
            tree = {
                name.removeprefix(of_row): t
                for name, t in arrived.tensors.items()
                if name.startswith(of_row)
            }
            asked += len(tree)
            try:
                tree = payload.unpacked(tree, shared, program, declared)
            except ValueError as error:
                return arrived._replace(failed="malformed", reason=str(error))
            norm = payload.norm(tree)
            why = rules.rejects(norm)
            if why is not None:
                above = f", above {rules.largest:.3g}" if why == "huge" else ""
                return arrived._replace(failed=why, reason=f"its norm is {norm:.3g}{above}")
            keep: Memory = {"counted": {"key": torch.tensor(key)}} if facts.get("kept") else {}
            parts[key] = payload.received(tree, keep)
        if len(arrived.tensors) != asked:
            return arrived._replace(failed="malformed", reason="it has more than was asked for")
        return parts

    def client_accuracy(self, model: Tree, memory: Mapping[int, Memory]) -> Tensor:  # [K]
        accuracy = torch.full((len(self.names),), torch.nan, dtype=torch.float64)
        orders = {
            client: {
                "experiment": self.experiment,
                "client": self.numbers[client],
                "size": size,
                "counted": counted(memory.get(client, {})),
            }
            for client, size in enumerate(self.sizes)
        }
        self._answers = {}
        sent = {f"model/{name}": t for name, t in model.items()}
        for client, arrived in self._ask("test", orders, sent, len(orders) + 1, 0):
            correct, size = (arrived.facts.get(name) for name in ("correct", "held_out"))
            if type(correct) is int and type(size) is int and 0 <= correct <= size and size:
                accuracy[client] = correct / size
            elif arrived.failed or "refused" in arrived.facts:
                self._say(client, arrived)
        return accuracy

    def _say(self, client: int, arrived: Reply) -> None:
        why = arrived.reason or str(arrived.facts.get("refused", ""))
        self.notify(self.names[client], f"{arrived.failed or 'refused'}{why and f': {why}'}")


def counted(memory: Memory) -> int | None:
    """The key of a client's last order that counted, or None if its site keeps no memory."""
    return int(memory["counted"]["key"]) if "counted" in memory else None
