"""The process of a site that speaks with the server: it takes orders, and sends the answers.

In place of Flower's SuperNode, which looks for a message every 3 s, and for an answer every 0.5 s.
Orders are answered by the Fedlens that is installed here (`worker.py`), and nothing else is done:
the app that a server sends with a run is never asked for.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.error import Error
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedlens.fleet import CA, CONNECTED, NODE_KEY
from fedlens.fleet.messages import ENDED, RAISED, TYPES, is_busy, packed, unpacked

NODE_ID = "node"  # in the folder of Flower: the id that the server knows this site by
SOON, LATE = 0.05, 3.0  # seconds, at least and at most, between two looks for an order
SHARE = 0.2  # of the time that nothing came: then it looks again
AGAIN = 0.1  # seconds until it tries again to get what the server has not yet sent in full
M_MMAP_THRESHOLD, PIECE = -3, 2**17  # bytes
ORDERS = {kind: what for what, kind in TYPES.items()}


def call_glibc(name: str, *given: int) -> None:
    """By glibc, where there is one, what Python has freed in pieces is given back."""
    with suppress(AttributeError):
        ctypes.CDLL(None)[name](*given)


class Worker:
    """The process that answers, which is started with the first order: it imports PyTorch."""

    def __init__(self, *words: str) -> None:
        self.words, self.link = words, None

    link: Connection | None

    def ask(self, what: str, facts: str, parcel: list[bytes]) -> tuple[str, bytes] | Error:
        """The answer to an order, whose tensors are taken out of the parcel."""
        if self.link is None:
            self.link, theirs = multiprocessing.Pipe()
            with theirs:
                handle = theirs.fileno()
                words = [sys.executable, "-m", "fedlens.fleet.worker", str(handle), *self.words]
                self.process = subprocess.Popen(words, pass_fds=[handle])
        try:
            self.link.send((what, facts))
            self.link.send_bytes(parcel.pop())
            said = self.link.recv()
            if isinstance(said, str):
                return Error(RAISED, said)
            return said[0], self.link.recv_bytes()
        except (EOFError, OSError):  # it was killed, or ran out of memory
            self.link = None
            self.process.wait()
            return Error(ENDED, "its process has ended")


def answer(message: Message, worker: Worker) -> Message:
    """The answer to a message of the server."""
    what = ORDERS.get(message.metadata.message_type)
    try:
        if what is None:
            raise ValueError("it is no order")
        facts, *parcel = unpacked(message.content)
    except ValueError as error:
        reason = Error(RAISED, str(error))
        return Message(reason, reply_to=message)
    message.content = packed("", b"")  # the memory of a site is for training
    call_glibc("malloc_trim", 0)
    found = worker.ask(what, facts, parcel)
    if isinstance(found, Error):
        return Message(found, reply_to=message)
    return Message(packed(*found), reply_to=message)


def serve(
    receive: Callable[[], Any],
    send: Callable[..., Any],
    pull: Callable[..., Any],
    push: Callable[..., Any],
    confirm: Callable[..., Any],
    worker: Worker,
) -> None:
    """Take orders and answer them, one after another, for ever."""

    def turn(message: Message, tree: Any) -> None:
        run = message.metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree,
            partial(pull, run),
            partial(confirm, run),
            return_type=Message,
            initial_backoff=AGAIN,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        begun = time.monotonic()
        reply = answer(message, worker)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            wanted, session = send(reply, get_object_tree(reply), time.monotonic() - begun)
            push_objects(
                get_all_nested_objects(reply),
                partial(push, run, session),
                object_ids_to_push=wanted,
            )

    since = time.monotonic()
    while True:
        try:
            found = receive()
        except RunNotRunningException:
            found = None
        except httpx.HTTPStatusError as error:
            if not is_busy(error):
                raise
            found = None
        if found is None:
            waited = time.monotonic() - since
            time.sleep(min(max(SOON, SHARE * waited), LATE))
            continue
        try:
            turn(*found)
        except (Exception, RunNotRunningException):  # of this order: the next may go well
            traceback.print_exc()
        since = time.monotonic()


def leave(server: str, certificates: bytes, own: Any, node: int) -> None:
    """End what a process that was killed has begun: its server would refuse this for a minute."""
    signed = [RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(*own)]
    with (
        suppress(httpx.HTTPError, RuntimeError),
        FleetHttpClient.from_server_address(server, False, certificates, signed) as client,
    ):
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))


def main(server: str, home: str, *words: str) -> None:
    """Serve a server until this process gets SIGTERM; `words` are the worker's."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    call_glibc("mallopt", M_MMAP_THRESHOLD, PIECE)
    place = Path(home)
    key: Any = load_ssh_private_key((place / NODE_KEY).read_bytes(), None)
    certificates, own = (place / CA).read_bytes(), (key, key.public_key())
    mark = place / "flower" / NODE_ID
    if mark.is_file():
        leave(server, certificates, own, int(mark.read_text()))
    with http_request_response(server, False, certificates, own) as linked:
        node, receive, send, _, _, pull, push, confirm = linked
        mark.write_text(str(node))
        print(CONNECTED, file=sys.stderr, flush=True)
        serve(receive, send, pull, push, confirm, Worker(home, *words))


if __name__ == "__main__":
    main(*sys.argv[1:])
