"""Serves a live page about runs, which reloads itself when the runs write new records."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedlens.report.blocks import Block, Curves
from fedlens.report.page import distinct, html
from fedlens.report.runs import headline, run_blocks, title_of
from fedlens.runs.records import read_all
from fedlens.storage.locks import is_locked
from fedlens.storage.run_files import EVALUATION, ROUNDS, SUMMARY

WRITTEN = (ROUNDS, SUMMARY, EVALUATION)
LOOK_SECONDS = 0.5  # minimum pause between two checks of the run folders
LOOK_SHARE = 0.1  # share of the time spent reading at most: the records may be long
ASK_SECONDS = 10.0  # time limit for a complete request
SEND_SECONDS = 60.0  # time limit for sending an answer
BEAT_SECONDS = 15.0  # a silent event stream gets a keep-alive line after this time


class Live:
    """The state of runs that may still be writing, as of the last `look`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.runs = read_all(folders)
        self.version = 0  # grows with each change
        self.closed = False
        self.changed = threading.Condition()
        self._pictures: dict[str, tuple[Block, str]] = {}
        self._page: tuple[int, bytes] | None = None
        self._drawing = threading.Lock()
        self._stamps = self._stamp()

    @property
    def ended(self) -> bool:
        return all(run.status != "running" for run in self.runs)

    def look(self) -> None:
        """Read the runs again if their files changed."""
        stamps = self._stamp()
        if stamps == self._stamps:
            return
        with suppress(OSError, ValueError):  # a run is being replaced: keep the last state
            self.runs, self._stamps = read_all(self.folders), stamps
            with self.changed:
                self.version += 1
                self.changed.notify_all()

    def wait(self, seen: int) -> int | None:
        """Wait up to `BEAT_SECONDS` for a version other than `seen`; None once this is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.version != seen or self.closed, BEAT_SECONDS)
            return None if self.closed else self.version

    def close(self) -> None:
        """Wake all waiting threads; `wait` then returns None."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def page(self) -> bytes:
        """The page as of the last `look`; each version is rendered once and cached."""
        with self._drawing:  # matplotlib's settings are global, so drawing needs the lock as well
            runs, version = self.runs, self.version
            if self._page is None or self._page[0] != version:
                blocks = distinct(run_blocks(runs))
                text = html(title_of(runs), headline(runs), blocks, self._picture, live=True)
                self._page = version, text.encode(errors="backslashreplace")
            return self._page[1]

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
        for path in (folder / name for folder in self.folders for name in WRITTEN):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size))
        return found


@contextmanager
def serving(folders: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve the live page of runs inside the `with` block; yield its URL. Port 0: any free port.

    If other machines can connect, the URL contains a random token, and requests without it fail.
    """
    live = Live(folders)
    home = "/" if _is_loopback(host) else f"/{secrets.token_urlsafe(16)}/"
    try:
        server = Server((host, port), _handler(live, host, home))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"cannot serve on {host}, port {port} ({reason}): choose another --host or --port"
        ) from error
    stop = threading.Event()

    def keep_looking() -> None:
        pause = LOOK_SECONDS
        while not stop.wait(pause):
            started = time.monotonic()
            live.look()
            pause = max(LOOK_SECONDS, (time.monotonic() - started) * (1 / LOOK_SHARE - 1))

    work = (server.serve_forever, keep_looking)
    threads = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in threads:
        thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_address[1]}{home}"
    finally:
        stop.set()
        live.close()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()


class Server(ThreadingHTTPServer):
    """An HTTP server with a thread for each connection; it closes those with slow requests."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.asking: dict[socket.socket, float] = {}  # open requests, with their start time
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def service_actions(self) -> None:
        """Close the connections whose request is incomplete after `ASK_SECONDS`; called often."""
        for connection, since in list(self.asking.items()):
            if time.monotonic() - since > ASK_SECONDS:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """Print nothing: the client has disconnected."""


def _handler(live: Live, host: str, home: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
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
            if _is_loopback(host) and not _is_loopback(_name(self.headers.get("Host", ""))):
                self.send_error(403, "ask by the address of this machine")  # against DNS rebinding
            elif hmac.compare_digest(self.path.encode(), home.encode()):
                self._send_page()
            elif hmac.compare_digest(self.path.encode(), f"{home}events".encode()):
                with suppress(OSError):  # the client has disconnected
                    self._send_events()
            else:
                self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: requests are not logged to the terminal."""

        def _send_page(self) -> None:
            content = live.page()
            self._begin("text/html; charset=utf-8", len(content))
            with suppress(OSError):
                self.wfile.write(content)

        def _send_events(self) -> None:
            self._begin("text/event-stream")
            seen, event = -1, ""
            while event != "end" and (version := live.wait(seen)) is not None:
                event = "" if version == seen else "end" if live.ended else "change"
                text = f"event: {event}\ndata: {version}\n\n" if event else ": still here\n\n"
                self.wfile.write(text.encode())
                self.wfile.flush()
                seen = version

        def _begin(self, kind: str, size: int | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Cache-Control", "no-store")
            if size is not None:
                self.send_header("Content-Length", str(size))
            self.end_headers()

    return Handler


def _name(header: str) -> str:
    with suppress(ValueError):  # not a valid host
        return urlsplit(f"//{header}").hostname or ""
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
