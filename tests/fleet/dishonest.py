"""A dishonest server. It speaks the real messages, and asks a site for what was not approved."""

from __future__ import annotations

import hashlib
import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedlens.config.experiment import Experiment
from fedlens.core import Tree
from fedlens.fleet.apps import client_app
from fedlens.fleet.messages import TYPES, packed, unpacked
from fedlens.fleet.payload import Reply, digest, read, written
from fedlens.fleet.policy import FILE
from fedlens.fleet.site import Site
from fedlens.fleet.terms import Terms, for_fleet
from fedlens.setup.data import load_dataset
from tests.fleet.sites import make_sites, terms_of, write_experiment


class Dishonest:
    """A server whose site is reached through the ClientApp that answers Flower's messages."""

    def __init__(self, folder: Path, policy: str = "", **experiment: Any) -> None:
        """One site approves an experiment of the server, which is honest so far."""
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as at a server
        path = write_experiment(folder, **experiment)
        described = for_fleet(Experiment.read(path))
        self.terms = Terms.of(described, load_dataset(described.dataset, None))
        self.site: Site = make_sites(path, folder / "sites")[0]
        (self.site.home / FILE).write_text(policy)

    def ask(self, what: str, tensors: Tree | None = None, **order: Any) -> Reply:
        """The answer to an order, whose other parts are those of an honest server."""
        if what == "sizes":
            honest: dict[str, Any] = {"terms": self.terms.text, "client": 0}
        else:
            honest = {"client": 0, "counted": None, "size": self.size()}
            honest |= {"keys": [1], "round": 0} if what == "train" else {}
        order = {"experiment": self.terms.hash, **honest, **order}
        content = packed(*written(order, tensors or {}))
        places = {"home": str(self.site.home), "data": str(self.site.data)}
        context = Context(1, 1, places, RecordDict(), {})
        reply = client_app()(Message(content, 1, TYPES[what]), context)
        return read(*unpacked(reply.content))

    def refused(self, what: str, tensors: Tree | None = None, **order: Any) -> str:
        """Why an order is refused, or "" if it is not; a refusal has no tensors."""
        arrived = self.ask(what, tensors, **order)
        assert not ("refused" in arrived.facts and arrived.tensors)
        return str(arrived.facts.get("refused", ""))

    def size(self) -> Any:
        return self.ask("sizes").facts.get("size")

    def offered(self, text: str) -> str:
        """Why the site does not take terms with this text."""
        wanted = hashlib.sha256(text.encode()).hexdigest()
        return self.refused("sizes", terms=text, experiment=wanted)


class DishonestSums:
    """A server that asks four sites for secure sums. Each stage has the orders of an honest one,
    with changes; what it returns are the answers by site, and in `refused` are the reasons."""

    def __init__(self, folder: Path, count: int = 4, **experiment: Any) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as at a server
        threshold = experiment.pop("threshold", 2 / 3)
        more = f"aggregation = {{ secure = true, threshold = {threshold} }}\n"
        path = write_experiment(folder, more=more, count=count, per_round=count, **experiment)
        self.sites = make_sites(path, folder / "sites")
        self.terms = terms_of(for_fleet(Experiment.read(path)), [one.home for one in self.sites])
        self.model, self.refused = model_to_train(0), dict[int, str]()
        self.sizes = {
            site: int(self._ask(site, "sizes", terms=self.terms.text).facts["size"])
            for site in range(count)
        }

    def _ask(self, site: int, what: str, tensors: Tree | None = None, **order: Any) -> Reply:
        order = {"experiment": self.terms.hash, "client": site, "round": 0, **order}
        content = packed(*written(order, tensors or {}))
        places = {"home": str(self.sites[site].home), "data": str(self.sites[site].data)}
        context = Context(1, 1, places, RecordDict(), {})
        reply = client_app()(Message(content, 1, TYPES[what]), context)
        return read(*unpacked(reply.content))

    def ask(
        self, what: str, orders: Mapping[int, Mapping[str, Any]], tensors: Tree | None = None
    ) -> dict[int, Reply]:
        """The answers to these orders, by site; `refused` has the others' reasons."""
        found, self.refused = {}, {}
        for site, order in orders.items():
            reply = self._ask(site, what, tensors, **order)
            if "refused" in reply.facts:
                assert not reply.tensors
                self.refused[site] = reply.facts["refused"]
            else:
                found[site] = reply
        return found

    def told(self, **changes: Any) -> dict[str, Any]:
        told = {
            "experiment": self.terms.hash,
            "round": 0,
            "model": digest(self.model),
            "sites": [*range(len(self.sites))],
            "examples": sum(self.sizes.values()),
            "counted": sum(self.sizes.values()),
            "attempt": secrets.token_hex(4),
        }
        return told | changes

    def begin(self, **changes: Any) -> dict[int, list[str]]:
        told = self.told(**changes)
        orders = {site: {"round": told["round"], "sum": told} for site in range(len(self.sites))}
        return {site: reply.facts["keys"] for site, reply in self.ask("keys", orders).items()}

    def share(self, keys: Mapping[int, list[str]]) -> dict[int, dict[int, str]]:
        arrived = self.ask("shares", {site: {"keys": keys} for site in keys if site >= 0})
        return {
            site: {int(k): v for k, v in reply.facts["sealed"].items()}
            for site, reply in arrived.items()
        }

    def train(
        self, sealed: Mapping[int, Mapping[int, str]], model: Tree | None = None, round: int = 0
    ) -> dict[int, Reply]:
        orders = {
            site: {
                **{"size": self.sizes[site], "keys": [site + 1], "counted": None, "round": round},
                "sealed": {k: v.get(site, "") for k, v in sealed.items() if k != site},
            }
            for site in sealed
        }
        return self.ask("train", orders, self.model if model is None else model)

    def agree(
        self, survivors: Collection[int], whom: Collection[int] | None = None
    ) -> dict[int, str]:
        whom = survivors if whom is None else whom
        arrived = self.ask("agree", {site: {"survivors": [*survivors]} for site in whom})
        return {site: reply.facts["signature"] for site, reply in arrived.items()}

    def open(
        self, signatures: Mapping[int, str], whom: Collection[int] | None = None
    ) -> dict[int, Mapping[str, Any]]:
        whom = signatures if whom is None else whom
        arrived = self.ask("open", {site: {"signatures": signatures} for site in whom})
        return {site: reply.facts for site, reply in arrived.items()}

    def masked(self, **changes: Any) -> dict[int, Reply]:
        """What sites send in an attempt that is honest so far."""
        return self.train(self.share(self.begin(**changes)), round=changes.get("round", 0))


def changed(terms: Terms, change: Callable[[dict[str, Any]], None]) -> str:
    """The text of terms, written as Fedlens writes them, with another content."""
    content = json.loads(terms.text)
    change(content)
    return json.dumps(content, sort_keys=True)


def with_value(terms: Terms, place: tuple[str | int, ...], value: Any) -> str:
    """The text of terms with another value at a place."""

    def put(content: Any) -> None:
        *parents, last = place
        for part in parents:
            content = content[part]
        content[last] = deepcopy(value)

    return changed(terms, put)


def places_in(value: Any, *place: str | int) -> list[tuple[str | int, ...]]:
    """The places of all values in nested tables and lists, with those of the tables."""
    found = [place] if place else []
    if isinstance(value, dict):
        found += [one for key, part in value.items() for one in places_in(part, *place, key)]
    if isinstance(value, list):
        found += [one for at, part in enumerate(value) for one in places_in(part, *place, at)]
    return found


def model_to_train(number: float) -> Tree:
    """A model to train, for images of 3×8×8 and four classes."""
    return {f"params/{name}": t[None] for name, t in _linear(number).items()}


def model_to_test(number: float = 0.0, always: int = 0) -> Tree:
    """A model to test, which finds the same class in every image."""
    model = _linear(number)
    model["fc.bias"][always] = 1e6
    return {f"model/{name}": t for name, t in model.items()}


def _linear(number: float) -> Tree:
    return {"fc.weight": torch.full((4, 192), float(number)), "fc.bias": torch.zeros(4)}


def process_that_approves(home: Path) -> subprocess.CompletedProcess[str]:
    fedlens = str(Path(sys.executable).parent / "fedlens")
    command = [fedlens, "fleet", "approve", str(home)]
    return subprocess.run(command, input="y\n", capture_output=True, text=True)
