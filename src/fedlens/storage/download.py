"""Receives files from addresses, from where an earlier connection was cut."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse

CHUNK = 1 << 16
TIMEOUT = 30.0  # seconds without data
SLOWEST = 1000  # bytes a second over this time, else the connection is given up


class Unreachable(ConnectionError):
    """An address does not provide the file; the message says why."""


class Cut(Unreachable):
    """A connection failed or ended too early. A new one may resume."""


def receive(url: str, start: int = 0, size: int | None = None) -> tuple[int, Iterator[bytes]]:
    """Where the chunks begin that a server gives of a file, at `start` or at 0; and the chunks.

    `size` is how long the file should be, for servers that do not say what they send.
    """
    headers = {"User-Agent": "fedlens"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with _errors_as_cuts():
            request = urllib.request.Request(url, headers=headers)
            response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return receive(url, 0, size)  # the file is shorter than what is here
        kind = Cut if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR else Unreachable
        raise kind(f"{error.code} {error.reason}") from error
    begin = start if response.status == HTTPStatus.PARTIAL_CONTENT else 0
    length = response.headers.get("Content-Length", "")
    due = int(length) if length.isdecimal() else 0 if size is None else size - begin
    return begin, _chunks(response, due)


def _chunks(response: HTTPResponse, due: int) -> Iterator[bytes]:
    total, since, before = 0, time.monotonic(), 0
    with response, _errors_as_cuts():
        while chunk := response.read1(CHUNK):
            yield chunk
            total, passed = total + len(chunk), time.monotonic() - since
            if passed >= TIMEOUT:
                if total - before < SLOWEST * passed:
                    raise Cut(f"it gives less than {SLOWEST} bytes a second")
                since, before = time.monotonic(), total
    if total < due:
        raise Cut("the connection was cut")


@contextmanager
def _errors_as_cuts() -> Iterator[None]:
    try:
        yield
    except (urllib.error.HTTPError, Cut):
        raise
    except (OSError, HTTPException) as error:
        raise Cut(str(getattr(error, "reason", None) or error) or type(error).__name__) from error
