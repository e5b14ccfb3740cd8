"""Serves a live page about runs, which reloads itself when the runs write new records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol

from fedlens.report.blocks import Block, Curves
from fedlens.report.local import Given, serving_locally
from fedlens.report.page import distinct, html
from fedlens.report.runs import headline, run_blocks, title_of
from fedlens.runs.records import Run, read_all
from fedlens.storage.locks import is_locked
from fedlens.storage.run_files import EVALUATION, ROUNDS, SUMMARY

WRITTEN = (ROUNDS, SUMMARY, EVALUATION)
LOOK_SECONDS = 0.5  # minimum pause between two checks of the run folders
LOOK_SHARE = 0.1  # share of the time spent reading at most: the records may be long


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
    """Serve the live page of runs inside the `with` block, as `serving_locally`; yield its URL."""
    live = Live(folders, beside)

    def respond(name: str, content: bytes | None) -> Given | None:
        if name or content is not None:
            return None
        version, page = live.page()
        return Given(page, version=str(version))

    with serving_locally(respond, host, port) as address:
        yield address
