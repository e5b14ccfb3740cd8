"""The engine of a fleet, whose clients are sites.

It sends orders, receives replies in any order, and checks each reply before it counts. Sites send
unweighted updates; they are weighted here, once it is known which sites have answered. With secure
sums they are weighted at the sites, and only their sum arrives (`secure/server.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from fedlens.algorithm.secure import SecureSum
from fedlens.core import Memory, Tree
from fedlens.core.federation import Examples
from fedlens.engines import Sequential
from fedlens.fleet import payload
from fedlens.fleet.keys import site_key
from fedlens.fleet.payload import Reply
from fedlens.fleet.secure.protocol import Unsafe, is_signed
from fedlens.fleet.secure.server import Below, Summed, Summing
from fedlens.fleet.secure.site import Told, whole_numbers
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine, Unreported
from fedlens.rounds.reports import Reporting
from fedlens.rounds.uploads import norm_of
from fedlens.rounds.work import Part, Shared, Work

DEADLINE = 3600.0  # seconds, if the experiment sets none
AWAY = 90.0  # seconds to wait for an offline site: Flower refuses a site for 60 after it died
LARGEST = 1000.0  # times the norm of the model: of an update, if the experiment sets no limit
PAUSE = 0.05  # seconds between two looks for what has arrived
STAGE = 120.0  # seconds at most for a stage of a secure sum in which nobody trains

T = TypeVar("T")


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
    public: Mapping[int, str] = field(default_factory=dict)  # with secure sums: keys, by number
    name: ClassVar[str] = "fleet"
    _answers: dict[int, Part] = field(default_factory=dict)  # of this round, by order key
    _away: set[int] = field(default_factory=set)  # sites that were offline for the whole wait
    _declared: Tree | None = None
    _sums: dict[tuple[int, ...], Summed] = field(default_factory=dict)  # by order keys
    _has: dict[int, int] = field(default_factory=dict)  # by client: the round whose model it has
    _round: int = 0
    _short: Tree = field(default_factory=dict)  # for sites that have the model of the round before

    @property
    def reporting(self) -> Reporting:
        return self.rules

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        self._round, self._short = work.rounds[0], payload.difference(shared)
        if isinstance(program.algorithm.combine, SecureSum):
            yield self._sum(program, shared, work)
            return
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
        own_keys, model = work.keys.tolist(), payload.model(shared)
        orders = {
            client: {
                **self._order(client, work),
                "size": self.sizes[client],
                "keys": [own_keys[row] for row in some],
                "counted": counted(work.memory[some[0]]),
            }
            for client, some in rows.items()
        }
        if self._declared is None:
            part = self._without_steps(replace(program, uncombined=True), shared)
            self._declared = payload.sent(part, program)
        algorithm, failed = program.algorithm, dict[int, str]()
        goal = min(algorithm.select.cohort_size, len(work))
        rules = self.rules
        needed = rules.needed(goal, algorithm.combine.fewest)
        if rules.largest is None:
            sent = norm_of([shared.params, shared.buffers], torch.zeros(1))
            rules = replace(rules, largest=LARGEST * max(float(sent.max()), 1.0))
        last = self.rules.deadline or DEADLINE
        for client, arrived in self._ask("train", orders, model, last, self._answers, goal, needed):
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
        last: float,
        good: Sized,
        goal: int,
        needed: int,
    ) -> Iterator[tuple[int, Reply]]:
        """Yield replies as they arrive, until all have arrived, or `goal` good ones, or the time is
        over (`last`, in seconds).

        An offline site gets its order when it comes back, if it comes back soon.
        """
        begun = time.monotonic()
        unsent, waiting = set(orders), set[int]()
        while unsent or waiting:
            passed = time.monotonic() - begun
            if passed > last or len(good) >= goal:
                break
            online = self.sites.online() & unsent
            if online:
                short = {c for c in online if self._short and self._has.get(c) == self._round - 1}
                short = short if what == "train" else set()
                for some, tree in ((online - short, tensors), (short, self._short)):
                    if some:
                        mine = {client: orders[client] for client in sorted(some)}
                        self.sites.send(what, mine, tree, last - passed)
                unsent, waiting = unsent - online, waiting | online
                self._away -= online
            for client, arrived in self.sites.arrived():
                waiting.discard(client)
                if what == "train":
                    good_one = arrived.failed is None and "refused" not in arrived.facts
                    self._has[client] = self._round if good_one else -1
                yield client, arrived
            for client in sorted(self.sites.gone() & (unsent | waiting)):
                unsent, waiting = unsent - {client}, waiting - {client}
                yield client, Reply({}, {}, "unavailable", "it was withdrawn")
            if unsent and not waiting:
                # Only offline sites are left. If enough others answered, do not wait again for
                # sites that were offline before.
                known = unsent <= self._away and len(good) >= needed
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
        declared = self._declared
        assert declared is not None
        arrived = self._named(arrived)
        facts = arrived.facts
        if arrived.failed is not None:
            return arrived
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

    def _named(self, arrived: Reply) -> Reply:
        """The reply, with how it failed, if it did."""
        facts = arrived.facts
        if arrived.failed is None and "refused" in facts:
            return arrived._replace(failed="refused", reason=str(facts["refused"]))
        if arrived.failed is None and facts.get("experiment") != self.experiment:
            return arrived._replace(failed="foreign", reason="it is another experiment's")
        return arrived

    def _order(self, client: int, work: Work) -> dict[str, Any]:
        """What is in all orders of a round, of which a site has the values in its terms."""
        return {
            "experiment": self.experiment,
            "client": self.numbers[client],
            "round": work.rounds[0],
        }

    def _without_steps(self, program: ClientProgram, shared: Shared) -> Part:
        none = Examples(torch.zeros((1, 1, 1, 1), dtype=torch.uint8), torch.zeros(1).long())
        return payload.without_steps(program, Sequential(self.network, none), shared)

    def _sum(self, program: ClientProgram, shared: Shared, work: Work) -> Part:
        """The secure sum of exactly these clients."""
        own_keys = tuple(work.keys.tolist())
        if own_keys not in self._sums and (failed := self._add_up(program, shared, work)):
            raise Unreported(failed)
        return self._sums.pop(own_keys).part(program, work)

    def _add_up(self, program: ClientProgram, shared: Shared, work: Work) -> dict[int, str]:
        """Keep the secure sum of those that stay; return the rows of the others, with the reason.

        If too few stay, the sum is lost, and these others are too many for a quorum.
        """
        secure, own_keys = program.algorithm.combine, work.keys.tolist()
        assert isinstance(secure, SecureSum)
        clients = work.cohort.clients.tolist()
        rows = {self.numbers[client]: row for row, client in enumerate(clients)}
        model, self._sums = payload.model(shared), {}
        like = self._without_steps(program, shared)
        covered = program.algorithm.covered
        told = Told(
            experiment=self.experiment,
            round=work.rounds[0],
            model=payload.digest(model),
            sites=tuple(sorted(rows)),
            examples=int(work.cohort.sizes.sum()),
            counted=work.cohort.num_examples,
            attempt=secrets.token_hex(16),
        )
        round = told.round_of(secure.threshold, secure.bits)
        needed = self.rules.needed(len(work), secure.fewest)
        why = dict.fromkeys(rows, "late")

        def ask(
            what: str,
            orders: Mapping[int, Mapping[str, Any]],
            tensors: Tree,
            read: Callable[[int, Reply], T],
        ) -> dict[int, T]:
            last, found = self.rules.deadline or DEADLINE, dict[int, T]()
            sent = {
                clients[rows[site]]: {**self._order(clients[rows[site]], work), **order}
                for site, order in orders.items()
            }
            for client, arrived in self._ask(
                *(what, sent, tensors, last if what == "train" else min(last, STAGE)),
                *(found, len(orders), needed),
            ):
                site, arrived = self.numbers[client], self._named(arrived)
                try:
                    if arrived.failed is None:
                        found[site] = read(site, arrived)
                except (AttributeError, LookupError, TypeError, ValueError, Unsafe) as error:
                    arrived = arrived._replace(failed="malformed", reason=str(error))
                if arrived.failed is not None:
                    why[site] = arrived.failed
                    self._say(client, arrived)
            for site in orders.keys() - found.keys():
                away = clients[rows[site]] in self._away
                why[site] = "unavailable" if away and why[site] == "late" else why[site]
            return found

        orders = {
            site: {
                "size": self.sizes[clients[row]],
                "keys": [own_keys[row]],
                "counted": counted(work.memory[row]),
            }
            for site, row in rows.items()
        }
        numbers = whole_numbers(like, covered)
        summing = Summing(
            ask, round, self._verify, needed, sum(t.numel() for t in numbers.values())
        )
        try:
            total = summing.run(asdict(told), orders, model)
        except Below:
            left = summing.there if len(summing.there) < needed else ()
            why |= dict.fromkeys(summing.there, "surplus")
            return {row: why[site] for site, row in rows.items() if site not in left}
        except ValueError as error:
            for site in rows:
                self.notify(self.names[clients[rows[site]]], f"malformed, as a share lies: {error}")
            return dict.fromkeys(rows.values(), "malformed")
        there = [site for site in rows if site in summing.there]
        kept = tuple(rows[site] for site in there)
        self._sums[tuple(own_keys[row] for row in kept)] = Summed(
            total, numbers, like, work, kept, [site in summing.kept for site in there]
        )
        return {row: why[site] for site, row in rows.items() if site not in summing.there}

    def _verify(self, site: int, message: bytes, signature: bytes) -> bool:
        return is_signed(site_key(self.public[site]), message, signature)

    def client_accuracy(self, model: Tree, memory: Mapping[int, Memory]) -> Tensor:  # [K]
        accuracy = torch.full((len(self.names),), torch.nan, dtype=torch.float64)
        for client, arrived in self._with_model("test", model, memory, {}):
            correct, size = (arrived.facts.get(name) for name in ("correct", "held_out"))
            if type(correct) is int and type(size) is int and 0 <= correct <= size and size:
                accuracy[client] = correct / size
            elif arrived.failed or "refused" in arrived.facts:
                self._say(client, arrived)
        return accuracy

    def leave(self, model: Tree, memory: Mapping[int, Memory], calibration: Any) -> None:
        """Send the final model to all sites, which keep it, with what calibrates it."""
        more = {"calibration": calibration}
        for client, arrived in self._with_model("keep", model, memory, more):
            if arrived.failed or "refused" in arrived.facts:
                self._say(client, arrived)

    def _with_model(
        self,
        what: str,
        model: Tree,
        memory: Mapping[int, Memory],
        more: Mapping[str, Any],
    ) -> Iterator[tuple[int, Reply]]:
        """Send all sites a model, and yield their replies."""
        orders = {
            client: {
                "experiment": self.experiment,
                "client": self.numbers[client],
                "size": size,
                "counted": counted(memory.get(client, {})),
                **more,
            }
            for client, size in enumerate(self.sizes)
        }
        sent, last = {f"model/{name}": t for name, t in model.items()}, self.rules.deadline
        return self._ask(what, orders, sent, last or DEADLINE, (), len(orders) + 1, 0)

    def _say(self, client: int, arrived: Reply) -> None:
        why = arrived.reason or str(arrived.facts.get("refused", ""))
        self.notify(self.names[client], f"{arrived.failed or 'refused'}{why and f': {why}'}")


def counted(memory: Memory) -> int | None:
    """The key of a client's last order that counted, or None if its site keeps no memory."""
    return int(memory["counted"]["key"]) if "counted" in memory else None
