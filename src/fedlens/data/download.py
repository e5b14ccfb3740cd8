"""Download one file: resume it after a lost connection, and verify it."""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedlens.data.catalogue import Download
from fedlens.storage.locks import try_lock

CHUNK = 1 << 16
ATTEMPTS = 4  # consecutive attempts without progress
TIMEOUT = 30.0  # seconds without data


class Unreachable(ConnectionError):
    """An address does not provide the file; the message says why."""


class Cut(Exception):
    """A connection ended too early; the message says why. A new connection may resume."""


def download(
    file: Download, bases: Sequence[str], place: Path, report: Callable[[int], None], wait: float
) -> None:
    """Download a file to `place`, from the first of the addresses that provides it.

    `report` is called with the bytes received so far. Raises Unreachable.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(place.name + ".part")
    reasons = []
    with _to_oneself(part):
        for base in bases:
            url = f"{base}/{file.name}"
            try:
                _fill(part, url, file.size, report, wait)
            except Unreachable as error:
                reasons.append(f"{url} ({error})")
                continue
            if md5_of(part) == file.md5:
                part.replace(place)
                return
            part.write_bytes(b"")
            reasons.append(f"{url} (wrong checksum, removed)")
        raise Unreachable(", ".join(reasons))


@contextmanager
def _to_oneself(part: Path) -> Iterator[None]:
    """Lock a file while it is downloaded: two processes at once would corrupt it."""
    with part.open("ab") as file:
        if try_lock(file.fileno()) is False:
            raise ValueError(f"{part} is being fetched by another process: wait until it is there")
        try:
            yield
        except BaseException:
            if not _size(part):
                part.unlink(missing_ok=True)
            raise


def md5_of(path: Path) -> str | None:
    """The md5 sum of a file, or None if there is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _fill(part: Path, url: str, size: int, report: Callable[[int], None], wait: float) -> None:
    """Receive until `part` has `size` bytes, or until the server has no more."""
    best, failures = _size(part), 0
    while _size(part) < size:
        try:
            _receive(part, url, size, report)
            return
        except Cut as error:
            failures = 1 if _size(part) > best else failures + 1
            best = max(best, _size(part))
            report(best)
            if failures == ATTEMPTS:
                raise Unreachable(str(error)) from error
            time.sleep(wait * 2 ** (failures - 1))


def _receive(part: Path, url: str, size: int, report: Callable[[int], None]) -> None:
    """Receive the rest of `part` over one connection; all of it if the server ignores ranges."""
    done = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "fedlens"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    with _opened(request, part) as response:
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        done = done if resumed else 0
        length = response.headers.get("Content-Length", "")
        end = done + int(length) if length.isdecimal() else size
        with part.open("ab" if resumed else "wb") as file:
            # One byte more than expected is enough to detect a wrong file.
            while done <= size and (chunk := _chunk(response, min(CHUNK, size + 1 - done))):
                file.write(chunk)
                done += len(chunk)
                report(min(done, size))
    if done < end and done <= size:
        raise Cut("the connection was cut")


def _opened(request: urllib.request.Request, part: Path) -> http.client.HTTPResponse:
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        why = f"{error.code} {error.reason}"
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.write_bytes(b"")
            raise Cut(why) from error
        if error.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise Cut(why) from error
        raise Unreachable(why) from error
    except (OSError, http.client.HTTPException) as error:
        raise Cut(str(getattr(error, "reason", error)) or type(error).__name__) from error


def _chunk(response: http.client.HTTPResponse, size: int) -> bytes:
    try:
        return response.read(size)
    except (OSError, http.client.HTTPException) as error:
        raise Cut(str(error) or type(error).__name__) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
