"""The only port that sites can reach. It forwards Flower's Fleet API and none of its other APIs.

A SuperLink has one port for sites, for users who start runs, and for its own apps, without accounts
for any of them. So it listens on this machine alone, and the gate forwards what sites need: twelve
paths, in requests that are signed with the key of a site and written anew.

Strangers cost it little: the head of a request is checked before its body is read, a body passes
through in pieces, and where connections are scarce those of strangers give way.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import resource
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h11
import httpx
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from fedlens.fleet import CA, ENROL, SERVER, SERVER_KEY, Notify
from fedlens.fleet.keys import enrol
from fedlens.storage.reading import printable, shortened

CALLS = (
    *("register-node", "activate-node", "deactivate-node", "unregister-node"),
    *("send-node-heartbeat", "pull-messages", "push-messages", "get-run", "get-fab"),
    *("push-object", "pull-object", "confirm-message-received"),
)
PATHS = frozenset(f"/v1/fleet/{call}".encode() for call in CALLS)
HOP = frozenset(  # headers of a single connection, or that the gate writes anew
    name.encode()
    for name in (
        *("host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-connection", "proxy-authorization", "expect"),
    )
)
PIECE = 2**16  # bytes that are read at once
MOST_BYTES = 64 * 2**20  # of a request: Flower sends arrays in pieces of 5 MB
SILENCE = 120.0  # seconds after which a site's connection on which nothing comes is closed
HANDSHAKE = 10.0  # seconds for a TLS handshake, and then for a stranger's first request
PAUSE = 0.5  # seconds until the next try, where a connection cannot be accepted
MOST_CONNECTIONS = 1000
BEHIND, AHEAD = 305.0, 5.0  # seconds by which a SuperLink allows the clock of a site to be wrong
REFUSED = 2004  # Flower's code for a SuperNode that is not let in


class Gate:
    """Listens on host:port, with the server's certificate; `inner` is the SuperLink's address.

    `names` has the names of the sites, by public key.
    """

    def __init__(
        self,
        host: str,
        port: int,
        inner: str,
        keys: Path,
        notify: Notify,
        names: Mapping[bytes, str],
    ) -> None:
        self.host, self.port, self.inner, self.keys, self.notify = host, port, inner, keys, notify
        self.names = names
        # A connection takes two handles, its own and one to the SuperLink; others need some too.
        handles, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = min(MOST_CONNECTIONS, handles // 3 if handles > 0 else MOST_CONNECTIONS)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._error: OSError | None = None
        self._told: set[str] = set()
        self._open: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], socket.socket | None] = {}
        """By age: no request was signed yet. With the connection of a task that has not begun."""
        self._thread = threading.Thread(target=self._run, name="fleet-gate", daemon=True)

    def __enter__(self) -> Gate:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            why = str(self._error.strerror).partition(" (while")[0]  # Python repeats the address
            raise ValueError(
                f"{self.host}:{self.port} cannot be listened on ({why}): choose another --address"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        outer.minimum_version = ssl.TLSVersion.TLSv1_2
        outer.load_cert_chain(self.keys / SERVER, self.keys / SERVER_KEY)
        trust = ssl.create_default_context(cafile=str(self.keys / CA))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        async with httpx.AsyncClient(
            base_url=f"https://{self.inner}", verify=trust, timeout=600.0, limits=limits
        ) as client:
            try:
                family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
                listener = socket.create_server((self.host, self.port), family=family, backlog=128)
            except OSError as error:
                self._error = error
                return
            with listener:
                listener.setblocking(False)
                accepting = asyncio.create_task(self._accept(listener, outer, client))
                self._ready.set()
                await self._stop.wait()
                for task in (accepting, *self._open):
                    task.cancel()
                await asyncio.gather(accepting, *self._open, return_exceptions=True)
                await asyncio.sleep(0.1)  # gives the transports time to close

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext, client: Any) -> None:
        while True:
            try:
                connection, peer = await self._loop.sock_accept(listener)
            except OSError as error:  # such as too many open files
                self._say(f"cannot take a connection ({error.strerror}): trying again")
                # Two handles: for the connection, and for the one to the SuperLink.
                if not (await self._made_room() and await self._made_room()):
                    await asyncio.sleep(PAUSE)
                continue
            if len(self._open) >= self.most and not await self._made_room():
                connection.close()
                continue
            task = asyncio.create_task(self._connection(connection, str(peer[0]), context, client))
            self._open.add(task)
            self._strangers[task] = connection
            task.add_done_callback(self._left)
            await asyncio.sleep(0)  # so that many who knock at once do not keep the others waiting

    def _left(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if (connection := self._strangers.pop(task, None)) is not None:
            connection.close()

    async def _made_room(self) -> bool:
        """End the oldest connection of a stranger; False if there is none."""
        self._say(
            "all connections are taken (`ulimit -n` sets how many there are): those on which no "
            "site has spoken give way"
        )
        oldest = next(iter(self._strangers), None)
        if oldest is None:
            return False
        oldest.cancel()
        await asyncio.wait([oldest])
        await asyncio.sleep(0)  # its socket is closed in the next step of the loop
        return True

    async def _connection(
        self, connection: socket.socket, peer: str, context: ssl.SSLContext, client: Any
    ) -> None:
        """Handle the requests of one connection, one after another."""

        task: Any = asyncio.current_task()
        self._strangers[task] = None
        reader = asyncio.StreamReader(loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE,
                ssl_shutdown_timeout=HANDSHAKE,
            )
        except OSError as error:
            connection.close()
            if isinstance(error, ssl.SSLError):
                why = (error.reason or "no TLS").replace("_", " ").lower()
                self._say(f"refused a connection from {peer}: {why}")
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        visit = Visit(h11.Connection(h11.SERVER, max_incomplete_event_size=PIECE), reader, writer)
        try:
            while True:
                known = task not in self._strangers
                request = await visit.event(SILENCE if known else HANDSHAKE)
                if type(request) is not h11.Request:
                    return
                if request.target == ENROL.encode():
                    await self._enrol(visit, peer)
                    return
                refusal = self._refusal(request, peer)
                if refusal is not None:
                    await visit.refuse(*refusal)
                    return
                self._strangers.pop(task, None)
                await self._pass_on(visit, client, request, peer)
                if visit.http.our_state is not h11.DONE or visit.http.their_state is not h11.DONE:
                    return
                visit.http.start_next_cycle()
        except (h11.RemoteProtocolError, OSError):
            return
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            writer.close()

    async def _enrol(self, visit: Visit, peer: str) -> None:
        """Let a site that was invited make its key known; its connection is closed then."""
        content = bytearray()
        try:
            async with asyncio.timeout(HANDSHAKE):
                async for piece in visit.body():
                    content += piece
                    if len(content) > PIECE:
                        raise ValueError("it is too long")
            told = json.loads(content)
            if not isinstance(told, dict):
                raise ValueError("it is none")
            name = told.get("name")
            key = enrol(self.keys, name, told.get("token"), told.get("public"))
        except (ValueError, RecursionError) as error:
            why = printable(shortened(str(error)))
            self._say(f"refused an invitation from {peer}: {why}")
            await visit.refuse(403, why)
            return
        last = self._loop.time() + HANDSHAKE
        while key not in self.names and self._loop.time() < last:
            await asyncio.sleep(0.1)  # until it is registered
        self._say(f"{name} came by its invitation")
        await visit.send(h11.Response(status_code=200, headers=[("connection", "close")]))
        await visit.send(h11.EndOfMessage())

    def _refusal(self, request: Any, peer: str) -> tuple[int, str] | None:
        """The status and the reason for refusing a request of which only the head was read."""
        if request.method != b"POST" or request.target not in PATHS:
            target, only = request.target[:80].decode("ascii", "replace"), "only the Fleet API"
            self._say(f"refused {target!r} from {peer}: sites may use {only}")
            return 404, only
        headers = dict(request.headers)
        why = self._stranger(headers)
        if why is not None:
            self._say(f"refused a site at {peer}: {why}")
            return 400, why  # at 401 a SuperNode ends, and does not log the reason
        length = headers.get(b"content-length", b"0")  # h11 has read it as a number
        return (413, "it is too large") if int(length) > MOST_BYTES else None

    def _stranger(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Why a request with these headers is not signed by a site, as Flower signs; None: it is.

        A SuperLink checks the same, but only after it has read all, and gives no reason.
        """

        key = _decoded(headers.get(b"flwr-public-key", b""))
        if key not in self.names:
            short = hashlib.sha256(key).hexdigest()[:12] if key else "(none)"
            return f"key {short} is not registered"
        stamp = headers.get(b"flwr-timestamp", b"")
        public: Any = load_pem_public_key(key)
        try:
            public.verify(_decoded(headers.get(b"flwr-signature", b"")), stamp, ECDSA(SHA256()))
            late = (datetime.now(UTC) - datetime.fromisoformat(stamp.decode())).total_seconds()
        except (InvalidSignature, ValueError, TypeError):
            return f"it has the key of {self.names[key]}, but did not sign with it"
        if -AHEAD < late < BEHIND:
            return None
        wrong = f"{abs(late):,.0f} s {'behind' if late > 0 else 'ahead of'} this server's"
        return f"the clock of {self.names[key]} is {wrong}: set both by a time server"

    async def _pass_on(self, visit: Visit, client: Any, request: Any, peer: str) -> None:
        headers = dict(request.headers)
        hop = HOP | {b"content-length"} if b"transfer-encoding" in headers else HOP
        try:
            async with client.stream(
                "POST",
                request.target.decode("ascii"),
                headers=[(name, value) for name, value in request.headers if name not in hop],
                content=visit.body(),
            ) as reply:
                refused = 400 <= reply.status_code < 500
                if refused and request.target.endswith(b"/activate-node"):
                    name = self.names[_decoded(headers[b"flwr-public-key"])]
                    why = f"{name} counts as connected already, for a minute after it stopped"
                    self._say(f"refused a site at {peer}: {why}")
                    await visit.refuse(reply.status_code, why)
                    return
                raw = [(name.lower(), value) for name, value in reply.headers.raw]
                back = [(name, value) for name, value in raw if name not in HOP]
                await visit.send(h11.Response(status_code=reply.status_code, headers=back))
                async for piece in reply.aiter_raw():
                    await visit.send(h11.Data(data=piece))
                await visit.send(h11.EndOfMessage())
        except httpx.HTTPError as error:  # the SuperLink is starting, or gone
            if visit.http.our_state is not h11.SEND_RESPONSE:
                raise ConnectionAbortedError from error
            await visit.refuse(503, "the SuperLink does not answer")

    def _say(self, line: str) -> None:
        """Pass a line to `notify`, once."""
        if line not in self._told and len(self._told) < 1000:
            self._told.add(line)
            self.notify(line)


class Visit:
    """The requests and the answers on one connection."""

    def __init__(
        self, http: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.http, self.reader, self.writer = http, reader, writer

    async def event(self, seconds: float) -> Any:
        """What comes next, in the terms of h11; a TimeoutError if nothing comes for so long."""

        async with asyncio.timeout(seconds):
            while (event := self.http.next_event()) is h11.NEED_DATA:
                self.http.receive_data(await self.reader.read(PIECE))
        return event

    async def body(self) -> AsyncIterator[bytes]:
        size = 0
        while type(event := await self.event(SILENCE)) is h11.Data:
            size += len(event.data)
            if size > MOST_BYTES:
                raise ConnectionAbortedError
            yield bytes(event.data)
        if type(event) is not h11.EndOfMessage:
            raise ConnectionAbortedError

    async def send(self, event: Any) -> None:
        self.writer.write(self.http.send(event) or b"")
        async with asyncio.timeout(SILENCE):
            await self.writer.drain()

    async def refuse(self, status: int, why: str) -> None:
        """Answer in the form of Flower's errors, so that the SuperNode of a site logs the reason.

        The connection must be closed then, since the body of the request may not be read.
        """

        text = json.dumps({"code": REFUSED, "detail": why}).encode()
        headers = [("content-length", str(len(text))), ("connection", "close")]
        await self.send(h11.Response(status_code=status, headers=headers))
        await self.send(h11.Data(data=text))
        await self.send(h11.EndOfMessage())


def _decoded(text: bytes) -> bytes:
    """What was sent as base64; empty if it is none."""
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""
