"""The only port that sites can reach. It forwards Flower's Fleet API and none of its other APIs.

A SuperLink has one port for sites, for users who start runs, and for its own apps, without accounts
for any of them. So it listens on this machine alone, and the gate forwards what sites need: twelve
paths, each request read completely and written anew.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
import ssl
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.fleet import Notify
from fedlens.fleet.keys import CA, SERVER, SERVER_KEY

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
        *("content-length", "proxy-connection", "proxy-authorization", "expect"),
    )
)
MOST_BYTES = 64 * 2**20  # of a request: Flower sends arrays in pieces of 5 MB
SILENCE = 120.0  # seconds after which a connection without a request is closed
HANDSHAKE = 20.0  # seconds for a TLS handshake
MOST_CONNECTIONS = 1000


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
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._error: OSError | None = None
        self._told: set[str] = set()
        self._open: set[asyncio.Task[None]] = set()
        self._transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
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
        import httpx

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
                listener = socket.create_server(
                    (self.host, self.port), family=_family(self.host), backlog=128
                )
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
                for transport in list(self._transports):
                    transport.abort()
                await asyncio.sleep(0.1)  # gives the transports time to close

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext, client: Any) -> None:
        while True:
            connection, peer = await self._loop.sock_accept(listener)
            if len(self._open) >= MOST_CONNECTIONS:
                connection.close()
                continue
            task = asyncio.create_task(self._connection(connection, str(peer[0]), context, client))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _connection(
        self, connection: socket.socket, peer: str, context: ssl.SSLContext, client: Any
    ) -> None:
        """Handle the requests of one connection, one after another."""
        import h11

        reader = asyncio.StreamReader(loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE
            )
        except OSError as error:
            connection.close()
            if isinstance(error, ssl.SSLError):
                why = (error.reason or "no TLS").replace("_", " ").lower()
                self._say(f"refused a connection from {peer}: {why}")
            return
        self._transports.add(transport)
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=2**16)
        try:
            while True:
                request, body = await asyncio.wait_for(_request(http, reader, h11), SILENCE)
                if request is None:
                    return
                await self._pass_on(http, writer, client, request, body, peer)
                if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                    return
                http.start_next_cycle()
        except (h11.RemoteProtocolError, OSError, TimeoutError):
            return
        finally:
            writer.close()

    async def _pass_on(
        self, http: Any, writer: Any, client: Any, request: Any, body: bytes | None, peer: str
    ) -> None:
        import httpx

        allowed = request.method == b"POST" and request.target in PATHS
        if not allowed:
            target = request.target[:80].decode("ascii", "replace")
            self._say(f"refused {target!r} from {peer}: sites may use only the Fleet API")
            await _respond(http, writer, 404, [], b"")
            return
        if body is None:
            await _respond(http, writer, 413, [], b"")
            return
        headers = [(name, value) for name, value in request.headers if name not in HOP]
        try:
            reply = await client.request(
                "POST", request.target.decode("ascii"), headers=headers, content=body
            )
        except httpx.HTTPError:  # the SuperLink is starting, or gone
            await _respond(http, writer, 503, [], b"")
            return
        if reply.status_code in (401, 403) or (
            reply.status_code >= 400 and request.target.endswith(b"/activate-node")
        ):
            self._say(f"refused a site at {peer}: {self._why(request.headers)}")
        back = [
            (name, value)
            for name, value in reply.headers.raw
            if name.lower() not in HOP | {b"content-encoding"}
        ]
        await _respond(http, writer, reply.status_code, back, reply.content)

    def _why(self, headers: Any) -> str:
        """Why the SuperLink refuses a site with the public key in these headers."""
        key = _key_of(headers)
        if key in self.names:
            return f"{self.names[key]} counts as connected already, for a minute after it stopped"
        short = hashlib.sha256(key).hexdigest()[:12] if key else "(none)"
        return f"key {short} is not registered"

    def _say(self, line: str) -> None:
        """Pass a line to `notify`, once."""
        if line not in self._told and len(self._told) < 1000:
            self._told.add(line)
            self.notify(line)


async def _request(http: Any, reader: asyncio.StreamReader, h11: Any) -> tuple[Any, bytes | None]:
    """The next request and its body (None if it is too large); (None, None) at the end."""
    request, parts, size = None, [], 0
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(2**16))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            size += len(event.data)
            if size <= MOST_BYTES:
                parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return request, b"".join(parts) if size <= MOST_BYTES else None
        else:
            return None, None


async def _respond(
    http: Any, writer: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    import h11

    length = (b"content-length", str(len(body)).encode())
    for event in (
        h11.Response(status_code=status, headers=[*headers, length]),
        h11.Data(data=body),
        h11.EndOfMessage(),
    ):
        sent = http.send(event)
        if sent:
            writer.write(sent)
    await writer.drain()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _key_of(headers: Any) -> bytes:
    """The public key in the headers of a site's request; empty if there is none."""
    shown = [value for name, value in headers if b"public-key" in name.lower()]
    try:
        return base64.b64decode(shown[0]) if shown else b""
    except ValueError:
        return b""
