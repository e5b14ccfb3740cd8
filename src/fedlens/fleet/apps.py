"""Fedlens as a Flower app: its ClientApp, its ServerApp, and the messages between them."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedlens.core import Tree
from fedlens.fleet.flower import end_with
from fedlens.fleet.members import read_members
from fedlens.fleet.messages import ENDED, TYPES, is_busy, packed, unpacked
from fedlens.fleet.payload import Reply, read, written
from fedlens.fleet.server import REPORTS, Job, run_job
from fedlens.fleet.site import Site

FAILED = {  # by Flower's error code; any other code means `raised`
    3: ("late", "it did not answer in time"),
    5: ("dropped", "it is not there any more"),
    ENDED: ("dropped", "its process ended before it had answered"),
}
LOOK = 1.0  # seconds between two checks of which sites are online
RATE = 20  # looks for replies in a second, at most, at all sites together
SHARE, LATE = 0.1, 1.0  # of the time that nothing came, and seconds: then it looks again


class Pull(threading.Thread):
    """Waits for the reply to one message.

    Flower gives a reply to the first who asks, and tells everybody else that there is none; and it
    waits for the rest of one whose site ended while it sent it. So nobody else asks for this reply,
    and it holds up no other.
    """

    def __init__(self, grid: Grid, message: str, of: int) -> None:
        super().__init__(daemon=True)
        self.grid, self.message, self.least = grid, message, of / RATE
        self.forgotten = threading.Event()
        self.found: list[Message] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        begun = time.monotonic()
        try:
            while not self.found and not self.forgotten.is_set():
                self.found = list(self.grid.pull_messages([self.message]))
                waited = time.monotonic() - begun
                if not self.found:
                    self.forgotten.wait(max(min(SHARE * waited, LATE), self.least))
        except Exception as error:
            self.error = error


@dataclass
class FlowerSites:
    """Sites that are reached over Flower's grid.

    `nodes` gives their node ids now, by client number; None for one that will not come back.
    """

    grid: Grid
    nodes: Callable[[], Sequence[int | None]]
    waiting: list[tuple[Pull, int, str | None]] = field(default_factory=list)
    """For replies, with the clients, and the start times of their nodes when they were asked."""
    looked: float = float("-inf")
    known: list[int | None] = field(default_factory=list)  # the nodes, when it last looked
    started: dict[int, str] = field(default_factory=dict)  # start times of online nodes, by client

    def online(self) -> set[int]:
        now = time.monotonic()
        if now - self.looked >= LOOK:
            there = {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}
            self.known = [*self.nodes()]
            self.started = {
                client: there[node] for client, node in enumerate(self.known) if node in there
            }
            self.looked = now
        return set(self.started)

    def gone(self) -> set[int]:
        return {client for client, node in enumerate(self.known) if node is None}

    def send(
        self, what: str, orders: Mapping[int, Mapping[str, Any]], tensors: Tree, seconds: float
    ) -> None:
        _, content = written({}, tensors)
        messages = [
            Message(
                packed(json.dumps(order), content),
                self.known[client],
                TYPES[what],
                ttl=max(seconds, 1.0),
            )
            for client, order in orders.items()
        ]
        ids = list(self.grid.push_messages(messages))
        self.waiting += [
            (Pull(self.grid, one, len(ids)), client, self.started.get(client))
            for one, client in zip(ids, orders, strict=True)
        ]
        self.looked = float("-inf")

    def arrived(self) -> list[tuple[int, Reply]]:
        found, left, there = list[tuple[int, Reply]](), [], self.online()
        for pull, client, started in self.waiting:
            if not pull.is_alive():
                if pull.error is not None and is_busy(pull.error):  # it may be gone: asked again
                    found.append((client, Reply({}, {}, "dropped", "Flower has lost its reply")))
                elif pull.error is not None:
                    raise pull.error
                found += [(client, _arrived(reply)) for reply in pull.found]
            # Flower reports a message whose node went offline, unless it restarted too quickly.
            elif client in there and self.started[client] != started:
                pull.forgotten.set()
                found.append((client, Reply({}, {}, "dropped", "it was started again")))
            else:
                left.append((pull, client, started))
        self.waiting = left
        return found

    def forget(self) -> None:
        for pull, *_ in self.waiting:
            pull.forgotten.set()
        self.waiting = []


def _arrived(reply: Message) -> Reply:
    if reply.has_error():
        reason = (reply.error.reason or "").splitlines()
        raised = ("raised", reason[0][:200] if reason else "")
        return Reply({}, {}, *FAILED.get(reply.error.code, raised))
    try:
        return read(*unpacked(reply.content))
    except ValueError as error:
        return Reply({}, {}, "malformed", str(error)[:200])


def client_app(experiment: Path | None = None) -> ClientApp:
    """The ClientApp of a site, which in Flower's simulation holds part of the experiment's data."""
    app = ClientApp()

    def answer(what: str, message: Message, context: Context) -> Message:
        order, tensors, *_ = read(*unpacked(message.content))
        reply = _site(context.node_config, order, experiment).answer(what, order, tensors)
        return Message(packed(*written(reply.facts, reply.tensors)), reply_to=message)

    for what, kind in TYPES.items():
        category, _, action = kind.partition(".")
        getattr(app, category)(action)(partial(answer, what))
    return app


def _site(config: Mapping[str, Any], order: Mapping[str, Any], experiment: Path | None) -> Site:
    if "home" in config and "data" in config:
        device = torch.device(str(config.get("device", "cpu")))
        places = Path(str(config["home"])), Path(str(config["data"]))
        return Site(*places, device, keeps_decoded=bool(config.get("cache", True)))
    if experiment is None or "partition-id" not in config:
        raise ValueError("the node has no home and no data: start it by `fedlens fleet join`")
    from fedlens.fleet.trial import part_of

    place = Path(tempfile.gettempdir()) / f"fedlens-simulated-{os.getuid()}"
    # Not by partition-id: its order among the nodes is random, and parts belong to clients.
    return part_of(experiment, place, int(order["client"]), int(config["num-partitions"]))


def server_app(experiment: Path | None = None) -> ServerApp:
    """The ServerApp. `job` in the run's configuration is the path of the `Job` file, or empty."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        if config["job"]:
            _run(grid, Path(str(config["job"])))
            return
        nodes: list[int] = []
        while len(nodes) < int(config["sites"]):
            nodes = sorted(grid.get_node_ids())
            time.sleep(0.5)
        names = {f"site-{place:04d}": node for place, node in enumerate(nodes)}
        out = str(Path(str(config["out"])).expanduser())
        job = Job(str(experiment), out, names, overwrite=bool(config["overwrite"]))
        run_job(job, lambda some: FlowerSites(grid, lambda: [names[n] for n in some]), print)

    return app


def _nodes(home: Path, names: Sequence[str]) -> list[int | None]:
    known = read_members(home)
    return [known[name].node if name in known else None for name in names]


def _run(grid: Grid, path: Path) -> None:
    """Run a job, and report about it in a file, which `serve.follow` reads."""
    job = Job.read(path)

    def report(kind: str, what: Any) -> None:
        with path.with_suffix(REPORTS).open("a") as file:
            file.write(json.dumps([kind, what]) + "\n")

    report("process", os.getpid())
    if job.served_by is not None:
        end_with(job.served_by)  # otherwise it keeps waiting for sites and locks the run folder
    try:
        done = run_job(
            job,
            lambda some: FlowerSites(grid, partial(_nodes, path.parent, some)),
            partial(report, "line"),
            partial(report, "record"),
        )
        outcome = {"status": done.status}
    except ValueError as error:
        outcome = {"mistake": str(error)}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    report("outcome", outcome)
    if "error" in outcome:
        raise RuntimeError(outcome["error"])
