"""A page that this machine serves: with the standard library alone, to itself unless told else."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ASK_SECONDS = 10.0  # time limit for a complete request
SEND_SECONDS = 60.0  # time limit for sending an answer
BODIES = 4  # requests with content that are in memory at the same time


class Given(NamedTuple):
    """The answer to a request."""

    content: bytes
    kind: str = "text/html; charset=utf-8"
    status: int = 200
    version: str = ""


Respond = Callable[[str, bytes | None], Given | None]
"""The answer to a request for a name below the address, with the content of a POST; None if there
is no such page."""


@contextmanager
def serving_locally(
    respond: Respond, host: str, port: int, largest: int = 0, seconds: float | None = None
) -> Iterator[str]:
    """Serve answers inside the `with` block; yield the URL. Port 0: any free port.

    If other machines can connect, the URL contains a random token, and requests without it fail.
    Requests may have `largest` bytes of content, and must arrive within `seconds`.
    """
    home = "/" if _is_loopback(host) else f"/{secrets.token_urlsafe(16)}/"
    try:
        server = _Server(host, port, home, respond, largest, seconds or ASK_SECONDS)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"cannot serve on {host}, port {port} ({reason}): choose another address or port"
        ) from error
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_address[1]}{home}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """An HTTP server with a thread for each connection; it closes those with slow requests."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, host: str, port: int, home: str, respond: Respond, largest: int, seconds: float
    ) -> None:
        self.host, self.home, self.respond = host, home, respond
        self.largest, self.seconds = largest, seconds
        self.bodies = BoundedSemaphore(BODIES)
        self.asking: dict[socket.socket, float] = {}  # open requests, with their start time
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def service_actions(self) -> None:
        """Close the connections whose request is incomplete after `seconds`; called often."""
        for connection, since in list(self.asking.items()):
            if time.monotonic() - since > self.seconds:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """Print nothing: the client has disconnected."""


class _Handler(BaseHTTPRequestHandler):
    """Answers with what `respond` gives, or with 304 if the client has that version."""

    server: _Server
    timeout = SEND_SECONDS

    def setup(self) -> None:
        self.server.asking[self.request] = time.monotonic()
        super().setup()

    def finish(self) -> None:
        self.server.asking.pop(self.request, None)
        super().finish()

    def do_GET(self) -> None:
        if self._is_allowed():
            self._answer(None)

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if not self._is_allowed():
            return
        if not (size.isascii() and size.isdecimal()):
            self.send_error(411)
        elif len(size) > 12 or int(size) > self.server.largest:
            self.send_error(413)
        else:
            with self.server.bodies:
                content = self.rfile.read(int(size))
                if len(content) == int(size):  # else it was cut
                    self._answer(content)

    def _is_allowed(self) -> bool:
        asked, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if _is_loopback(self.server.host) and not _is_loopback(_name(asked)):
            self.send_error(403, "ask by the address of this machine")  # against DNS rebinding
            return False
        if origin is not None and origin.partition("://")[2] != asked:
            self.send_error(403, "ask from the page itself")  # another page in the same browser
            return False
        home, given = self.server.home.encode(), self.path.encode()
        if not hmac.compare_digest(given[: len(home)], home):
            self.send_error(404)
            return False
        return True

    def _answer(self, content: bytes | None) -> None:
        self.server.asking.pop(self.request, None)
        name = self.path[len(self.server.home) :]
        given = self.server.respond(name, content)
        if given is None:
            self.send_error(404)
            return
        is_known = bool(given.version) and given.version == self.headers.get("If-None-Match")
        headers = {"Content-Type": given.kind, "Cache-Control": "no-store", "ETag": given.version}
        self.send_response(304 if is_known else given.status)
        for header, value in headers.items():
            if value:
                self.send_header(header, value)
        self.end_headers()
        with suppress(OSError):  # the client has disconnected
            self.wfile.write(b"" if is_known else given.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: requests are not logged to the terminal."""


def _name(header: str) -> str:
    with suppress(ValueError):  # not a valid host
        return urlsplit(f"//{header}").hostname or ""
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
