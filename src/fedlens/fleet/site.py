"""How a site answers the server's orders: it reports its sizes, trains, or tests a model.

It runs the Fedlens that is installed here, on an experiment that was approved here. It takes only
data from the server: the terms of an experiment, a model, the key of an order.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from fedlens.algorithm import Algorithm
from fedlens.algorithm.distributed import drawn_at_a_site
from fedlens.algorithm.dp_sgd import at_a_site
from fedlens.algorithm.pieces.upload import difference, own_model
from fedlens.config.experiment import Experiment
from fedlens.core import Facts, Memory, Tree, keys
from fedlens.core.federation import Examples, Holdings
from fedlens.core.trees import in_order, map_tensors, moved
from fedlens.engines import Sequential, Stacked
from fedlens.evaluation.metrics import is_right
from fedlens.fleet import CACHE, STAGES, final, payload
from fedlens.fleet.account import Account, mark
from fedlens.fleet.approvals import Approval, Approvals, Offer
from fedlens.fleet.log import Log, about, noted
from fedlens.fleet.payload import Reply, num_bytes
from fedlens.fleet.policy import Policy, Refused
from fedlens.fleet.secure.protocol import Unsafe
from fedlens.fleet.secure.site import Sums, check_part, in_sum, whole_numbers
from fedlens.fleet.site_data import Checked, identity, num_examples, site_examples
from fedlens.fleet.terms import Terms
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.cohorts import DRAW
from fedlens.rounds.download import DIFFERENCE, followed
from fedlens.rounds.work import Shared, work_alone
from fedlens.runs.folder import from_bytes, to_bytes
from fedlens.runs.loop import torch_settings
from fedlens.runs.manifest import versions
from fedlens.setup.algorithm import make_algorithm
from fedlens.setup.data import divided, split_seed
from fedlens.setup.devices import own_threads
from fedlens.setup.network import make_network
from fedlens.storage import free_memory
from fedlens.storage.files import write_atomically
from fedlens.storage.reading import printable, shortened

OWN_MISTAKE = "something is wrong with its own files: its log says what"
ROOM, MORE = 5, 15  # times the model: see `sends_its_model`; measured where it is one tensor
MISTAKE = "mistake.txt"  # in its folder: what was wrong with its own files, for a person there


@dataclass(frozen=True)
class Site:
    """A site: its own folder, its data, and the device it trains on."""

    home: Path
    data: Path
    device: torch.device = torch.device("cpu")
    keeps_decoded: bool = True  # images, in a cache

    @property
    def approvals(self) -> Approvals:
        return Approvals(self.home)

    @property
    def left_out(self) -> Collection[str]:
        """Files that cannot be decoded, and that a person here has left out."""
        found = Checked.read(self.home)
        return () if found is None else found.left_out

    def offer(self, terms: Terms, client: int) -> Offer:
        """What is to be approved: the experiment by this site, with the examples that it has."""
        without = self.left_out
        size = 0 if terms.privacy is None else num_examples(self.data, without)
        return Offer(terms.text, client, identity(self.data, without), size)

    def answer(self, what: str, order: Mapping[str, Any], tensors: Tree) -> Reply:
        """The reply to an order; the reply to a refused order says why."""
        begun = time.monotonic()
        asked = {"sizes": self._sizes, "train": self._train, "test": self._test, "keep": self._keep}
        asked |= {stage: partial(self._stage, stage) for stage in STAGES}
        mistake: Exception | None = None
        try:
            reply = asked[what](order, tensors)
        except (Refused, Unsafe) as refusal:
            reply = Reply({"refused": str(refusal)}, {})
        except ValueError as error:
            mistake, reply = error, Reply({"refused": OWN_MISTAKE}, {})
        except Exception as error:
            mistake, reply = error, Reply({"raised": type(error).__name__}, {})
        mark = self._log(what, order, tensors, reply, mistake, time.monotonic() - begun)
        wanted = order.get("experiment")
        reply = reply._replace(facts={"experiment": wanted, "log": mark, **reply.facts})
        if "raised" in reply.facts:
            raise RuntimeError(f"{reply.facts['raised']}: its log says why") from mistake
        return reply

    def _sizes(self, order: Mapping[str, Any], tensors: Tree) -> Reply:
        """The number of its examples; also its label counts if the algorithm discloses them."""
        try:
            terms = Terms(str(order.get("terms")))
        except ValueError as error:
            raise Refused(shortened(f"its terms cannot be taken: {error}")) from error
        if terms.hash != order.get("experiment"):
            raise Refused("the terms are not those of the hash")
        offer, approvals = self.offer(terms, _client(order)), self.approvals
        if terms.hash not in approvals.approved() or approvals.of(terms.hash).offer != offer:
            approvals.offer(offer)
        task = self._task(order, begins=True)
        if not task.memory.keep_layers(terms.content.frozen, tensors):
            return Reply({"lacks": "layers"}, {})
        facts: dict[str, Any] = {
            "size": int(task.holdings.sizes.sum()),
            "held_out": 0 if task.tested is None else int(task.tested.sizes.sum()),
            "versions": versions(),
        }
        try:
            task.check_room(Policy.read(self.home))
        except ValueError as error:
            raise Refused(str(error)) from error
        if "label_counts" in task.terms.algorithm.discloses:
            facts["label_counts"] = task.facts.label_counts[0].tolist()
        return Reply(facts, {})

    def _train(self, order: Mapping[str, Any], tensors: Tree) -> Reply:
        task = self._task(order)
        round: Any = order.get("round")
        counted, own_keys = order.get("counted"), order.get("keys")
        if type(round) is not int or not 0 <= round < task.terms.rounds:
            wanted = shortened(repr(round), 20)
            raise Refused(f"it was asked for round {wanted} of {task.terms.rounds}")
        # With the values that the schedules of the terms have in this round.
        algorithm, private = make_algorithm(task.experiment, round), task.terms.privacy is not None
        if private:
            of_examples = algorithm.objective.private is not None
            algorithm = at_a_site(algorithm) if of_examples else drawn_at_a_site(algorithm)
        layout, augment = task.network.layout, task.experiment.augment
        program = ClientProgram(algorithm, layout, augment, uncombined=True)
        if not own_keys or not isinstance(own_keys, list) or not all(map(_is_whole, own_keys)):
            raise Refused("its order has no valid keys")
        remembered = task.memory
        tensors = remembered.whole(tensors, algorithm, round)
        sums, told = None, None
        if task.terms.sums is not None:
            sums = self._sums(task.terms, task.client)
            told = sums.begun(round, payload.digest(tensors))
            program = replace(program, uncombined=False, measures_norm=True)
            if len(own_keys) > 1:
                raise Refused("it was asked for several updates in one sum")
        given = {name: t for name, t in tensors.items() if not name.startswith("told/")}
        task.check_model(given, stacked=True)
        parts = {"buffers": {}, "told": {}} | payload.nested(tensors)
        floats = (parts["params"] | parts["buffers"]).items()
        # As they are: what is subtracted from float64 is float64.
        shared = Shared(**parts, exact={n: t for n, t in floats if t.is_floating_point()})
        if algorithm.download:
            remembered.write_model(round, parts["params"])
        policy = Policy.read(self.home)
        if sends_its_model(task.terms, algorithm, policy):
            program = replace(program, algorithm=replace(algorithm, upload=own_model))
        memory = remembered.read(counted)
        if memory is None:
            first = map_tensors((shared.params, shared.buffers, shared.told), lambda t: t[0])
            memory = program.memory(*first)
        # Of all that an update depends on, so that only the same update is free.
        inputs = tensors | payload.flat({"memory": memory})
        digests = [payload.digest(inputs, round, key) for key in own_keys]
        # Another cohort gives it another share: the same update is then another part of a sum.
        name = [*digests, *([str((told.sites, told.examples, told.counted))] if told else [])]
        if (private or sums) and (before := remembered.reply(name)) is not None:
            kept = any(map(remembered.has, own_keys))
            before = before if sums is None else sums.masked(before, order)
            return Reply({"keys": own_keys, "kept": kept}, before)
        self._count(task, algorithm, digests)
        remembered.forget_others(counted)
        several = torch.tensor(own_keys, dtype=torch.int64)
        holdings = task.holdings.take(torch.zeros(len(several), dtype=torch.int64))
        plan = algorithm.draw(holdings, keys.fold(several, DRAW))
        facts = map_tensors(task.facts, lambda t: t.expand(len(several), *t.shape[1:]))
        work = work_alone(plan, several, facts, memory)
        if told is not None:
            work = in_sum(algorithm, told, work)
        sent: Tree = {}
        kept = False
        # One thread where a worker process has one, for bit-identical results.
        threads = 1 if task.experiment.engine == "processes" else own_threads()
        with torch_settings(task.experiment, self.device, threads):
            trained = list(task.engine.map(program, moved(shared, self.device), work))
        for row, part in enumerate(map_tensors(trained, lambda t: t.cpu())):
            if told is None:
                travels = payload.packed(part, shared, program)
                sent |= {f"{row}/{name}": t for name, t in travels.items()}
                if policy.largest_norm is not None:
                    policy.check_update(payload.norm(payload.sent(part, program)))
            else:
                policy.check_update(check_part(part, algorithm, task.experiment.reporting))
                sent |= whole_numbers(part, algorithm.covered)
            if part.keep[0]:
                remembered.write(own_keys[row], part.keep[0])
                kept = True
        if private or sums:
            remembered.write_reply(name, sent)
        if sums is not None:
            sent = sums.masked(sent, order)
        return Reply({"keys": own_keys, "kept": kept}, sent)

    def _test(self, order: Mapping[str, Any], tensors: Tree) -> Reply:
        """The number of its held-out examples that a model classifies correctly."""
        task = self._task(order)
        if task.tested is None:
            raise Refused("it has no held-out examples")
        model = task.own_model(order, tensors)
        # Accuracies reveal something about the examples, so the number of tested models is limited.
        digest, most = payload.digest(model), task.terms.most_tested
        self.approvals.change(task.terms.hash, lambda one: one.used("models", [digest], most))
        correct, index = 0, task.tested.index
        for some in torch.split(index, 500):
            logits = task.network.predict(model, {}, task.examples.read(some))
            wanted = task.examples.wanted(some, len(task.terms.classes))
            correct += int(is_right(logits, wanted).sum())
        return Reply({"correct": correct, "held_out": len(index)}, {})

    def _keep(self, order: Mapping[str, Any], tensors: Tree) -> Reply:
        """Keep the final model, with the site's own layers, for people there."""
        task = self._task(order)
        model = task.own_model(order, tensors) | task.network.frozen
        calibration = None if task.terms.algorithm.personal else order.get("calibration")
        final.keep(self.home, task.terms, task.experiment, model, calibration)
        return Reply({}, {})

    def _task(self, order: Mapping[str, Any], begins: bool = False) -> Task:
        """The experiment of an order, if it is approved here and the site's policy allows it.

        The site is the client, and has the examples, with which it was approved.
        """
        approved, client = self.approvals.of(str(order.get("experiment"))).offer, _client(order)
        terms, policy = approved.terms, Policy.read(self.home)
        policy.check(terms)
        without = self.left_out
        approved.check(client, identity(self.data, without))
        if terms.privacy is not None:
            Account(self.home).ledger()  # or a ValueError
        cache = self.home / CACHE if self.keeps_decoded else None
        memory = SiteMemory(self.home / "memory" / terms.hash)
        task = Task(
            terms, site_examples(self.data, terms, cache, without), client, self.device, memory
        )
        if task.tested is not None:
            policy.check_held_out(len(task.tested.index))
        if not begins and order.get("size") != int(task.holdings.sizes.sum()):
            raise Refused("the server counts on another number of its examples: begin another run")
        return task

    def _stage(self, what: str, order: Mapping[str, Any], tensors: Tree) -> Reply:
        """A stage of a secure sum, besides the training."""
        offer, client = self.approvals.of(str(order.get("experiment"))).offer, _client(order)
        Policy.read(self.home).check(offer.terms)
        if client != offer.client or offer.terms.sums is None:
            raise Refused("it was not approved for such sums")
        return Reply(self._sums(offer.terms, client).answer(what, order), {})

    def _sums(self, terms: Terms, client: int) -> Sums:
        return Sums(self.home, terms, client, self.approvals.of(terms.hash).at)

    def _count(self, task: Task, algorithm: Algorithm, digests: Sequence[str]) -> None:
        """Count updates before they are made; Refused beyond what was approved, or the budget.

        With privacy no update is free: made again, it has other noise.
        """
        terms, private = task.terms, task.terms.privacy is not None
        new = [secrets.token_hex(32) for _ in digests] if private else digests

        def change(one: Approval) -> Approval:
            after = one.used("updates", new, terms.most_updates)
            if private:
                size = int(task.holdings.sizes.sum())
                Account(self.home).pay(terms, algorithm, size, len(new))
            return after

        self.approvals.change(terms.hash, change)

    def _log(
        self,
        what: str,
        order: Mapping[str, Any],
        given: Tree,
        reply: Reply,
        mistake: Exception | None,
        seconds: float,
    ) -> str:
        """Write down an order and what is sent, before it is; return the mark of the log."""
        wanted, facts = shortened(printable(str(order.get("experiment")))), reply.facts
        found: dict[str, Any] = {"asked": what, "experiment": wanted}
        if type(order.get("round")) is int:
            found["round"] = order["round"]
        found["got"] = about(given)
        if mistake is not None:
            path, text = self.home / MISTAKE, f"{type(mistake).__name__}: {mistake}"
            if not path.is_file() or path.read_text() != text:
                write_atomically(path, text.encode())
            found["mistake"] = path.stat().st_mtime_ns  # and not what it says: it names files
        for key in ("refused", "raised"):
            found |= {key: facts[key]} if key in facts else {}
        if not facts.keys() & {"refused", "raised"}:
            terms = self.approvals.of(wanted).offer.terms
            sent = {"facts": [*facts], **about(reply.tensors), "guarantee": terms.guarantee}
            found["sent"] = sent
            if what == "train" and terms.privacy is not None:
                found["ledger"] = mark(Account(self.home).ledger())
        more = noted("server", order.get("log"))
        return Log(self.home).add("answered", **found, seconds=round(seconds, 3), **more)


@dataclass(frozen=True)
class SiteMemory:
    """A site's memory of an experiment, in its own folder, written in two steps.

    The memory after an order is written before the update is sent, under the order's key. It
    becomes valid when the server has used the update: the next order names the key of the last
    order that counted. So a client whose update was late or rejected continues from its memory
    before that order.
    """

    folder: Path

    def read(self, counted: int | None) -> Memory | None:
        """The memory after the last order that counted, or None if none has counted."""
        if counted is None:
            return None
        path = self._path(counted) if type(counted) is int else None
        if path is None or not path.is_file():
            raise Refused("it has lost what it remembers of this experiment")
        memory: Memory = in_order(
            payload.nested(from_bytes(path.read_bytes(), torch.device("cpu")))
        )
        return memory

    def forget_others(self, counted: int | None) -> None:
        """Delete the memory of all orders except the last that counted."""
        kept = None if counted is None else self._path(counted)
        for path in self.folder.glob("*.safetensors"):
            if path != kept:
                path.unlink(missing_ok=True)

    def has(self, key: int) -> bool:
        return self._path(key).is_file()

    def whole(self, tensors: Tree, algorithm: Algorithm, round: int) -> Tree:
        """What was sent, with the model in the place of its difference to that of a round ago."""
        parts = payload.nested(tensors)
        if DIFFERENCE not in parts:
            return tensors
        path = self._model(round - 1)
        if not path.is_file():
            raise Refused("it has lost the model of the round before")
        start = from_bytes(path.read_bytes(), torch.device("cpu"))
        try:
            params = followed(algorithm.download, start, parts.pop(DIFFERENCE))
        except (AttributeError, ValueError) as error:
            raise Refused(f"the difference that was sent is none of the model: {error}") from error
        return payload.flat({"params": map_tensors(params, lambda t: t[None]), **parts})

    def write_model(self, round: int, params: Tree) -> None:
        """Keep what the server's next difference will be to; and the one before, for repeats."""
        content = to_bytes(map_tensors(params, lambda t: t[0]))
        write_atomically(self._model(round), content)
        self._model(round - 2).unlink(missing_ok=True)

    def keep_layers(self, wanted: str, sent: Tree) -> bool:
        """Keep the layers that come once, if they were sent; return whether they are here."""
        if wanted and sent and not self._model("layers").is_file():
            if payload.digest(sent) != wanted:
                raise Refused("the layers that were sent are not those that were approved")
            write_atomically(self._model("layers"), to_bytes(sent))
        return not wanted or self._model("layers").is_file()

    def layers(self) -> Tree:
        if not self._model("layers").is_file():
            raise Refused("it has lost the layers that stay as they are: begin another run")
        return from_bytes(self._model("layers").read_bytes(), torch.device("cpu"))

    def _model(self, what: int | str) -> Path:
        return self.folder / "model" / f"{what}.safetensors"

    def reply(self, digests: Sequence[str]) -> Tree | None:
        """What was last sent, if it was computed from the same."""
        path = self._reply(digests)
        return from_bytes(path.read_bytes(), torch.device("cpu")) if path.is_file() else None

    def write_reply(self, digests: Sequence[str], sent: Tree) -> None:
        write_atomically(self._reply(digests), to_bytes(sent))

    def _reply(self, digests: Sequence[str]) -> Path:
        name = hashlib.sha256("".join(digests).encode()).hexdigest()
        return self.folder / f"sent-{name}.safetensors"

    def write(self, key: int, memory: Memory) -> None:
        write_atomically(self._path(key), to_bytes(payload.flat(memory)))

    def _path(self, key: int) -> Path:
        return self.folder / f"{key % 2**64:016x}.safetensors"


@dataclass(frozen=True)
class Task:
    """An approved experiment on a site's examples."""

    terms: Terms
    examples: Examples
    client: int  # its client number in the federation
    device: torch.device
    memory: SiteMemory

    @cached_property
    def experiment(self) -> Experiment:
        return self.terms.experiment(self.examples)

    @cached_property
    def _held(self) -> tuple[Holdings, Holdings | None]:
        everything = Holdings.of([torch.arange(len(self.examples))])
        if not self.experiment.clients.holdout:
            return everything, None
        share, seed = self.experiment.clients.holdout, split_seed(self.experiment)
        return divided(everything, share, seed, torch.tensor([self.client]))

    @property
    def holdings(self) -> Holdings:
        return self._held[0]

    @property
    def tested(self) -> Holdings | None:
        return self._held[1]

    @cached_property
    def facts(self) -> Facts:
        count = len(self.terms.classes)
        counts = self.holdings.label_counts(self.examples.wanted(slice(None), count), count)
        return Facts(self.holdings.sizes, counts)

    @cached_property
    def network(self) -> Network:
        frozen = self.memory.layers() if self.terms.content.frozen else None
        dataset: Any = self.experiment.dataset
        network = make_network(self.experiment, dataset, frozen)[0]
        network.forget()
        return network

    @cached_property
    def engine(self) -> Sequential | Stacked:
        examples = self.examples.to(self.device)
        if self.device.type == "cuda":
            return Stacked(self.network, examples)
        return Sequential(self.network, examples, fast=self.experiment.engine == "processes")

    def check_room(self, policy: Policy) -> None:
        """Raise ValueError if the model is too large to be trained here."""
        times = ROOM if sends_its_model(self.terms, self.terms.algorithm, policy) else MORE
        parts = {"the model, its gradients and its update": times * num_bytes(self.network)}
        free_memory.demand("the model", parts, "close other programs, or take a smaller model")

    def own_model(self, order: Mapping[str, Any], tensors: Tree) -> Tree:
        """The model that was sent, with what the site has of its own in place of the server's."""
        model = {name.removeprefix("model/"): t for name, t in tensors.items()}
        self.check_model(model)
        own = self.memory.read(order.get("counted")) or {}
        return make_algorithm(self.experiment).model_of(model, own)

    def check_model(self, given: Tree, stacked: bool = False) -> None:
        like, buffers = self.network.initial, self.network.buffers
        if stacked:  # as `payload.model` has it
            like = {
                f"{'buffers' if name in buffers else 'params'}/{name}": t[None]
                for name, t in like.items()
            }
        wrong = payload.mismatch(given, like)
        if wrong is not None:
            raise Refused(f"the model that was sent is of another form: {wrong}")


def sends_its_model(terms: Terms, algorithm: Algorithm, policy: Policy) -> bool:
    """Whether the trained model leaves as it is: then no update in float64 is needed here."""
    plain = algorithm.upload is difference and not algorithm.channel
    return plain and terms.sums is None and policy.largest_norm is None


def _client(order: Mapping[str, Any]) -> int:
    client: Any = order.get("client")
    if not _is_whole(client) or client < 0:
        raise Refused("its order names no client")
    return int(client)


def _is_whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63
