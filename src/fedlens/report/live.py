"""Serves a live page about runs, which reloads itself when the runs write new records."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from fedlens.report.blocks import Block, Curves
from fedlens.report.page import distinct, html
from fedlens.report.runs import headline, run_blocks, title_of
from fedlens.runs.records import Run, read_all
from fedlens.storage.locks import is_locked
from fedlens.storage.run_files import EVALUATION, ROUNDS, SUMMARY

WRITTEN = (ROUNDS, SUMMARY, EVALUATION)
LOOK_SECONDS = 0.5  # minimum pause between two checks of the run folders
LOOK_SHARE = 0.1  # share of the time spent reading at most: the records may be long
ASK_SECONDS = 10.0  # time limit for a complete request
SEND_SECONDS = 60.0  # time limit for sending an answer


class Beside(Protocol):
    """What a page has besides its runs: the sites of a fleet."""

    @property
    def title(self) -> str: ...

    @property
    def file(self) -> Path:
        """The file whose changes are shown."""

    @property
    def begun(self) -> bool:
        """Whether the runs are there yet."""

    def headline(self) -> str: ...

    def blocks(self) -> list[Block]: ...


class Live:
    """The page of runs that may still be writing."""

    def __init__(self, folders: Sequence[Path], beside: Beside | None = None) -> None:
        self.folders, self.beside = folders, beside
        self.runs = self._read()
        self.version = 0  # grows with each change
        self._pictures: dict[str, tuple[Block, str]] = {}
        self._page: tuple[int, bytes] | None = None
        self._lock = Lock()  # matplotlib's settings are global, so one thread draws at a time
        self._stamps = self._stamp()
        self._next_look = 0.0

    def refresh(self) -> None:
        """Read the runs again if their files changed."""
        started, stamps = time.monotonic(), self._stamp()
        if stamps != self._stamps:
            with suppress(OSError, ValueError):  # a run is being replaced: keep the last state
                self.runs, self._stamps = self._read(), stamps
                self.version += 1
        ended = time.monotonic()
        self._next_look = ended + max(LOOK_SECONDS, (ended - started) * (1 / LOOK_SHARE - 1))

    def page(self) -> tuple[int, bytes]:
        """The version of the runs and its page, which is rendered once and cached."""
        with self._lock:
            if time.monotonic() >= self._next_look:
                self.refresh()
            if self._page is None or self._page[0] != self.version:
                text = self._render()
                self._page = self.version, text.encode(errors="backslashreplace")
            return self._page

    def _read(self) -> list[Run]:
        there = self.beside is None or self.beside.begun
        return read_all(self.folders) if there else []

    def _render(self) -> str:
        runs, beside = self.runs, self.beside
        going = any(run.status == "running" for run in runs) or not runs
        live: Literal["yes", "ended"] = "yes" if going else "ended"
        blocks = run_blocks(runs) if runs else []
        title, summary = (title_of(runs), headline(runs)) if runs else ("", "")
        if beside is not None:
            blocks, title = [*blocks[:2], *beside.blocks(), *blocks[2:]], title or beside.title
            summary = ". ".join(filter(None, [summary, beside.headline()]))
        return html(title, summary, distinct(blocks), self._picture, live)

    def _picture(self, block: Any) -> str:
        """The SVG of a block, cached while the block is equal; page.js draws curves itself."""
        from fedlens.report import draw

        if isinstance(block, Curves):
            return ""
        kept = self._pictures.get(block.slug)
        if kept is None or kept[0] != block:
            drawn = draw.pictures(block, ["svg"])["svg"].decode()
            kept = self._pictures[block.slug] = (block, draw.for_page(drawn, block.slug))
        return kept[1]

    def _stamp(self) -> list[tuple[int, int] | bool]:
        """A value that changes when a run writes or is killed: locks, file times and sizes."""
        found: list[tuple[int, int] | bool] = [is_locked(folder) for folder in self.folders]
        beside = [] if self.beside is None else [self.beside.file]
        for path in (*beside, *(folder / name for folder in self.folders for name in WRITTEN)):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size))
        return found


@contextmanager
def serving(
    folders: Sequence[Path],
    host: str = "127.0.0.1",
    port: int = 0,
    beside: Beside | None = None,
) -> Iterator[str]:
    """Serve the live page of runs inside the `with` block; yield its URL. Port 0: any free port.

    If other machines can connect, the URL contains a random token, and requests without it fail.
    """
    home = "/" if _is_loopback(host) else f"/{secrets.token_urlsafe(16)}/"
    try:
        server = Server(host, port, home, Live(folders, beside))
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


class Server(ThreadingHTTPServer):
    """An HTTP server with a thread for each connection; it closes those with slow requests."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, host: str, port: int, home: str, live: Live) -> None:
        self.host, self.home, self.live = host, home, live
        self.asking: dict[socket.socket, float] = {}  # open requests, with their start time
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)

    def service_actions(self) -> None:
        """Close the connections whose request is incomplete after `ASK_SECONDS`; called often."""
        for connection, since in list(self.asking.items()):
            if time.monotonic() - since > ASK_SECONDS:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """Print nothing: the client has disconnected."""


class Handler(BaseHTTPRequestHandler):
    """Answers with the page, or with 304 if its version is the one that the client has."""

    server: Server
    timeout = SEND_SECONDS

    def setup(self) -> None:
        self.server.asking[self.request] = time.monotonic()
        super().setup()

    def finish(self) -> None:
        self.server.asking.pop(self.request, None)
        super().finish()

    def do_GET(self) -> None:
        self.server.asking.pop(self.request, None)
        asked = _name(self.headers.get("Host", ""))
        if _is_loopback(self.server.host) and not _is_loopback(asked):
            self.send_error(403, "ask by the address of this machine")  # against DNS rebinding
        elif not hmac.compare_digest(self.path.encode(), self.server.home.encode()):
            self.send_error(404)
        else:
            version, content = self.server.live.page()
            known = self.headers.get("If-None-Match") == str(version)
            self.send_response(304 if known else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("ETag", str(version))
            self.end_headers()
            with suppress(OSError):  # the client has disconnected
                self.wfile.write(b"" if known else content)

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
