from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from urllib.error import HTTPError
from urllib.parse import SplitResult, urlsplit
from urllib.request import Request, urlopen

import pytest

from fedlens.report import live, local
from fedlens.report.live import serving
from fedlens.storage.locks import FolderLock

Make = Callable[..., Path]


def add_round(folder: Path, round: int, accuracy: float) -> None:
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps({"round": round, "test_accuracy": accuracy}) + "\n")


class Reader:
    """Asks for a page as page.js does."""

    def __init__(self, address: str) -> None:
        self.address, self.version = address, ""

    def ask(self) -> str | None:
        """The page, or None if it is the one that the reader has."""
        request = Request(self.address, headers={"If-None-Match": self.version})
        try:
            with urlopen(request, timeout=300) as answer:
                self.version = answer.headers["ETag"]
                return cast(bytes, answer.read()).decode()
        except HTTPError as error:
            assert error.code == 304
            return None

    def next_page(self) -> str:
        while (page := self.ask()) is None:
            time.sleep(0.01)
        return page


def test_a_page_is_renewed_as_another_process_writes(recorded: Make) -> None:
    folder = recorded("going", [{"round": 1, "test_accuracy": 0.5}], status="running")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({"status": "running"}))
    with FolderLock(folder), serving([folder]) as address:
        reader = Reader(address)
        page = reader.next_page()
        assert "going reached 50.0% test accuracy (running, 1 round)" in page
        assert 'data-live="yes"' in page
        with (folder / "rounds.jsonl").open("a") as file:
            file.write('{"round": 2, "test_accu')  # torn: it is no error, and says nothing yet
        assert "50.0%" in reader.next_page()
        with (folder / "rounds.jsonl").open("a") as file:
            file.write('racy": 0.75}\n')
        assert "going reached 75.0%" in reader.next_page()
        summary["status"] = "finished"
        (folder / "summary.json").write_text(json.dumps(summary | {"final": {}}))
        assert 'data-live="ended"' in reader.next_page()


def test_a_run_that_dies_without_a_word_is_seen_as_interrupted(recorded: Make) -> None:
    folder = recorded("going", [{"round": 1, "test_accuracy": 0.5}], status="running")
    (folder / "summary.json").write_text(json.dumps({"status": "running"}))
    lock = FolderLock(folder)
    with serving([folder]) as address:
        reader = Reader(address)
        assert 'data-live="yes"' in reader.next_page()
        lock.release()  # as the system does for a process that was killed
        page = reader.next_page()
    assert 'data-live="ended"' in page
    assert "(interrupted after 1 round)" in page


def test_a_run_that_is_being_replaced_leaves_the_page_as_it_was(
    run_folder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)
    folder = run_folder("a", rounds=4)
    with serving([folder]) as address:
        reader = Reader(address)
        assert "after 4 rounds" in reader.next_page()
        (folder / "manifest.json").unlink()
        add_round(folder, 5, 0.9)
        assert reader.ask() is None
        assert "after 4 rounds" in urlopen(address).read().decode()


def test_a_file_that_goes_while_it_is_looked_at_is_looked_for_again(
    run_folder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder("run", rounds=4)
    shown = live.Live([folder])
    (folder / "summary.json").write_text("{}")

    def gone(path: Path) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    shown.refresh()
    assert shown.version == 0
    monkeypatch.undo()
    shown.refresh()
    assert shown.version == 1


def test_only_this_machine_may_ask_by_default(run_folder: Make) -> None:
    with serving([run_folder("a", rounds=2)]) as address:
        place = urlsplit(address)
        assert place.hostname == "127.0.0.1"
        for path, host, status in (
            ("/", "localhost", 200),
            ("/", "evil.example", 403),
            ("/../../etc/passwd", "localhost", 404),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", place.port or 0)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            assert answer.status == status
            answer.read()
            connection.close()


def answer(place: SplitResult, request: bytes) -> bytes:
    with socket.create_connection((place.hostname, place.port or 0), timeout=300) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_host_that_is_no_name_gets_an_answer(run_folder: Make) -> None:
    with serving([run_folder("a", rounds=2)]) as address:
        for host in (b"[", b"[::1", b"]", b"\xff", b""):
            request = b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
            assert answer(urlsplit(address), request).startswith(b"HTTP/1.0 403 ")


def test_a_connection_that_drips_is_cut(run_folder: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ASK_SECONDS", 0.2)
    with serving([run_folder("a", rounds=2)]) as address:
        place = urlsplit(address)
        with socket.create_connection((place.hostname, place.port or 0), timeout=300) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nX: ")  # and never the end of it
            assert slow.recv(100) == b""
        with (
            socket.create_connection((place.hostname, place.port or 0), timeout=300) as dripping,
            pytest.raises(ConnectionError),
        ):
            dripping.sendall(b"GET / HTTP/1.1\r\nX: ")
            for _ in range(60_000):  # letters of a line that may have 65,536
                dripping.sendall(b"x")
                time.sleep(0.005)


def test_two_hundred_readers_are_served_and_the_page_is_made_once(
    recorded: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def html(*_: object, **__: object) -> str:
        made.append(1)
        return "a page"

    monkeypatch.setattr(live, "html", html)
    folder = recorded("going", [{"round": 1, "test_accuracy": 0.5}], status="running")
    (folder / "summary.json").write_text(json.dumps({"status": "running"}), encoding="utf-8")
    lock = FolderLock(folder)  # without one nobody runs it
    with serving([folder]) as address, ThreadPoolExecutor(200) as readers:
        pages = [readers.submit(Reader(address).next_page) for _ in range(200)]
        assert {page.result() for page in pages} == {"a page"}
    lock.release()
    assert made == [1]


def test_others_than_this_machine_need_the_token(run_folder: Make) -> None:
    with serving([run_folder("a", rounds=2)], host="0.0.0.0") as address:
        place = urlsplit(address)
        here = SplitResult("http", f"127.0.0.1:{place.port}", place.path, "", "")
        assert len(place.path) > 20
        assert "a reached" in urlopen(here.geturl(), timeout=300).read().decode()
        for path in ("/", f"{place.path[:-2]}/", "/x/"):
            request = f"GET {path} HTTP/1.1\r\nHost: a.example\r\n\r\n".encode()
            assert answer(here, request).startswith(b"HTTP/1.0 404 ")


def test_a_port_that_is_taken_is_named(run_folder: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ValueError, match=rf"port {port} .*choose another address or port"),
            serving([run_folder("a", rounds=2)], port=port),
        ):
            pass


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(run_folder: Make, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "fedlens", "watch", str(run_folder("a", rounds=2))]
    process = subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    with process.stdout as out:
        address = out.readline().split()[1]
        assert "a reached" in urlopen(address).read().decode()
        process.send_signal(sent)
        assert process.wait(300) == 0
        assert out.read() == "stopped\n"
