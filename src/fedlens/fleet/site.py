"""How a site answers the server's orders: it reports its sizes, trains, or tests a model.

It runs the Fedlens that is installed here, on an experiment that was approved here. It takes only
data from the server: the terms of an experiment, a model, the key of an order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedlens import keys
from fedlens.client import ClientProgram
from fedlens.core import Facts, Tree
from fedlens.engines import Sequential, Stacked
from fedlens.experiment import Experiment
from fedlens.federation import Examples, Holdings
from fedlens.files import write_atomically
from fedlens.fleet import payload
from fedlens.fleet.memory import SiteMemory
from fedlens.fleet.policy import Policy, Refused
from fedlens.fleet.site_data import identity, site_examples
from fedlens.fleet.terms import Terms, read_terms
from fedlens.network.network import Network
from fedlens.reporting.cohorts import DRAW
from fedlens.runs.settings import torch_settings
from fedlens.setup.algorithm import make_algorithm
from fedlens.setup.data import held_out
from fedlens.setup.network import make_network
from fedlens.trees import map_tensors, moved

OFFERED, APPROVED = "offered", "approved"
HELD = "held"  # by experiment: the identity of its examples when the run began
OWN_MISTAKE = "something is wrong with its own files: its log says what"
LOG = "log.jsonl"  # in its folder: each order, and what was sent


class Reply(NamedTuple):
    """What a site sends back."""

    facts: Mapping[str, Any]
    tensors: Tree


@dataclass(frozen=True)
class Site:
    """A site: its own folder, its data, and the device it trains on."""

    home: Path
    data: Path
    device: torch.device = torch.device("cpu")

    def answer(self, what: str, order: Mapping[str, Any], tensors: Tree) -> Reply:
        """The reply to an order; the reply to a refused order says why."""
        begun = time.monotonic()
        asked = {"sizes": self._sizes, "train": self._train, "test": self._test}
        because = ""  # for the log here: file and class names stay private
        try:
            reply = asked[what](order, tensors)
        except Refused as refusal:
            reply = Reply({"refused": str(refusal)}, {})
        except ValueError as error:
            reply, because = Reply({"refused": OWN_MISTAKE}, {}), str(error)
        except Exception as error:
            raised, seconds = type(error).__name__, time.monotonic() - begun
            self._log(what, order, {"raised": raised}, str(error), {}, seconds)
            raise RuntimeError(f"{raised}: its log says why") from error
        facts = {"experiment": order.get("experiment"), **reply.facts}
        self._log(what, order, facts, because, reply.tensors, time.monotonic() - begun)
        return Reply(facts, reply.tensors)

    def approve(self, terms: Terms) -> None:
        self._keep(APPROVED, terms)

    @property
    def offers(self) -> list[Terms]:
        """The terms that were offered and are not approved yet, the newest first."""
        found = sorted(
            (self.home / OFFERED).glob("*.json"),
            key=lambda path: path.stat().st_mtime,
            reverse=True,
        )
        new = [path for path in found if not (self.home / APPROVED / path.name).is_file()]
        return [read_terms(path.read_text(), path.stem) for path in new]

    def _keep(self, where: str, terms: Terms) -> None:
        write_atomically(self.home / where / f"{terms.hash}.json", terms.text.encode())

    def _sizes(self, order: Mapping[str, Any], tensors: Tree) -> Reply:
        """The number of its examples; also its label counts if the algorithm discloses them."""
        terms = Terms(str(order["terms"]))
        if terms.hash != order.get("experiment"):
            raise Refused("the terms are not those of the hash")
        if not (self.home / APPROVED / f"{terms.hash}.json").is_file():
            self._keep(OFFERED, terms)
        task = self._task(order)
        facts: dict[str, Any] = {
            "size": int(task.holdings.sizes.sum()),
            "held_out": 0 if task.tested is None else int(task.tested.sizes.sum()),
        }
        if "label_counts" in task.terms.algorithm.discloses:
            facts["label_counts"] = task.facts.label_counts[0].tolist()
        write_atomically(self.home / HELD / terms.hash, identity(self.data).encode())
        return Reply(facts, {})

    def _train(self, order: Mapping[str, Any], tensors: Tree) -> Reply:
        task = self._task(order)
        program = task.program_of(order.get("round"))
        own_keys = [int(key) for key in order["keys"]]
        counted = order.get("counted")
        self._count(task.terms, "orders", own_keys[0], task.terms.rounds)
        shared = payload.shared_of(task.as_ordered(tensors))
        remembered = self._memory(task.terms)
        memory = remembered.read(counted)
        if memory is None:
            first = map_tensors((shared.params, shared.buffers, shared.told), lambda t: t[0])
            memory = program.memory(*first)
        remembered.settle(counted)
        several = torch.tensor(own_keys, dtype=torch.int64)
        holdings = task.holdings.take(torch.zeros(len(several), dtype=torch.int64))
        plan = program.algorithm.draw(holdings, keys.fold(several, DRAW))
        facts = map_tensors(task.facts, lambda t: t.expand(len(several), *t.shape[1:]))
        work = payload.work_alone(plan, several, facts, memory)
        sent: Tree = {}
        kept = False
        with torch_settings(task.experiment, self.device):
            parts = list(task.engine.map(program, moved(shared, self.device), work))
        for row, part in enumerate(map_tensors(parts, lambda t: t.cpu())):
            tree = payload.sent(part)
            Policy.read(self.home).check_update(payload.norm(tree))
            if part.keep[0]:
                remembered.write(own_keys[row], part.keep[0])
                kept = True
            sent |= {f"{row}/{name}": t for name, t in tree.items()}
        return Reply({"keys": own_keys, "kept": kept}, sent)

    def _test(self, order: Mapping[str, Any], tensors: Tree) -> Reply:
        """The number of its held-out examples that a model classifies correctly."""
        task = self._task(order)
        if task.tested is None:
            raise Refused("it has no held-out examples")
        model = {name.removeprefix("model/"): t for name, t in tensors.items()}
        task.check_model(model, task.network.params | task.network.buffers)
        # Accuracies reveal something about the examples, so the number of tested models is limited.
        self._count(task.terms, "models", payload.digest(model), task.terms.rounds + 1)
        own = self._memory(task.terms).read(order.get("counted")) or {}
        model = make_algorithm(task.experiment).model_of(model, own)
        correct, index = 0, task.tested.index
        for some in torch.split(index, 500):
            logits = task.network.predict(model, {}, task.examples.read(some))
            correct += int((logits.argmax(1) == task.examples.labels[some]).sum())
        return Reply({"correct": correct, "held_out": len(index)}, {})

    def _task(self, order: Mapping[str, Any]) -> Task:
        """The experiment of an order, if it is approved here and the site's policy allows it."""
        wanted = str(order.get("experiment"))
        path = self.home / APPROVED / f"{wanted}.json"
        if not wanted.isalnum() or not path.is_file():
            raise Refused(
                f"experiment {wanted[:12]} is not approved here: see `fedlens fleet approve`"
            )
        terms = read_terms(path.read_text(), wanted)
        Policy.read(self.home).check(terms)
        examples = site_examples(self.data, terms, self.home / "cache")
        task = Task(terms, examples, int(order["client"]), self.device)
        known, held = order.get("size"), self.home / HELD / wanted
        if known is not None and (
            known != int(task.holdings.sizes.sum())
            # The same number may be other examples, and held-out ones would become training ones.
            or (held.is_file() and held.read_text() != identity(self.data))
        ):
            raise Refused(
                "its examples are not those that it had when the run began: put them back as they "
                "were, or begin another run"
            )
        return task

    def _memory(self, terms: Terms) -> SiteMemory:
        return SiteMemory(self.home / "memory" / terms.hash)

    def _count(self, terms: Terms, kind: str, one: int | str, most: int) -> None:
        """Refuse more than `most` different orders or models; a repeated one counts once."""
        path = self.home / kind / f"{terms.hash}.json"
        known = set(json.loads(path.read_text())) if path.is_file() else set()
        known.add(one)
        if len(known) > most:
            raise Refused(f"it was asked more often than in the {terms.rounds} rounds approved")
        write_atomically(path, json.dumps(sorted(known)).encode())

    def _log(
        self,
        what: str,
        order: Mapping[str, Any],
        facts: Mapping[str, Any],
        because: str,
        tensors: Tree,
        seconds: float,
    ) -> None:
        """Append to the log a line about an order and what was sent."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "asked": what,
            "experiment": str(order.get("experiment"))[:12],
            "said": {name: value for name, value in facts.items() if name != "experiment"},
            **({"because": because} if because else {}),
            "sent_tensors": len(tensors),
            "sent_bytes": sum(t.nbytes for t in tensors.values()),
            "seconds": round(seconds, 3),
        }
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Task:
    """An approved experiment on a site's examples."""

    terms: Terms
    examples: Examples
    client: int  # its client number in the federation
    device: torch.device

    @cached_property
    def experiment(self) -> Experiment:
        return self.terms.experiment(self.examples)

    @cached_property
    def _held(self) -> tuple[Holdings, Holdings | None]:
        everything = Holdings.of([torch.arange(len(self.examples))])
        if not self.experiment.clients.holdout:
            return everything, None
        return held_out(everything, self.experiment, torch.tensor([self.client]))

    @property
    def holdings(self) -> Holdings:
        return self._held[0]

    @property
    def tested(self) -> Holdings | None:
        return self._held[1]

    @cached_property
    def facts(self) -> Facts:
        counts = self.holdings.label_counts(self.examples.labels, len(self.terms.classes))
        return Facts(self.holdings.sizes, counts)

    @cached_property
    def network(self) -> Network:
        dataset = self.experiment.dataset
        return make_network(self.experiment, dataset)[0]  # type: ignore[arg-type]

    def program_of(self, round: Any) -> ClientProgram:
        """The client program with the values that the terms' schedules have in a round."""
        if type(round) is not int or not 0 <= round < self.terms.rounds:
            raise Refused(f"it was asked for round {round!r} of {self.terms.rounds}")
        algorithm = make_algorithm(self.experiment, round)
        return ClientProgram(algorithm, self.network.layout, self.experiment.augment, apart=True)

    @cached_property
    def engine(self) -> Sequential | Stacked:
        examples = self.examples.to(self.device)
        if self.device.type == "cuda":
            return Stacked(self.network, examples)
        fast = self.experiment.engine == "processes"
        if fast:
            torch.set_num_threads(1)  # like a worker process, for bit-identical results
        return Sequential(self.network, examples, fast)

    def as_ordered(self, tensors: Tree) -> Tree:
        """Return the server's tensors; raise Refused if the model is not of this experiment."""
        like = {
            f"{kind}/{name}": t[None]
            for kind, tree in (("params", self.network.params), ("buffers", self.network.buffers))
            for name, t in tree.items()
        }
        given = {name: t for name, t in tensors.items() if not name.startswith("told/")}
        self.check_model(given, like)
        return tensors

    def check_model(self, given: Tree, like: Tree) -> None:
        wrong = payload.mismatch(given, like)
        if wrong is not None:
            raise Refused(f"the model that was sent is of another form: {wrong}")
