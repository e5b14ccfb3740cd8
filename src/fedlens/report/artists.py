"""Processes that draw the pictures of a page.

To import matplotlib takes longer than many a run, and to draw a page takes as long again. So a
command that will draw has one process import it meanwhile, and those that draw are forked from that
one, as many as there are cores.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import repeat
from multiprocessing import forkserver
from pathlib import Path

from fedlens.report.pictures import Drawn

IMPORTED = [
    "fedlens.cli.main",  # which a process that is forked takes for its own main module
    "fedlens.report.draw",
    "matplotlib.backends.backend_pdf",
    "matplotlib.backends.backend_svg",
]

Drawing = Callable[[int, int], None]
"""Told how many figures are drawn, of how many."""


def get_ready() -> None:
    """Start the process that the others are forked from; it imports what they need meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()


@contextmanager
def artists() -> Iterator[Executor | None]:
    """Processes for `save_all`, which start when there is something to draw.

    For commands alone: in a program whose main module is not guarded they would run it again.
    """
    get_ready()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("forkserver")) as processes:
        yield processes


def save_all(
    blocks: Sequence[Drawn],
    folder: Path,
    processes: Executor | None = None,
    watch: Drawing | None = None,
) -> dict[str, str]:
    """Write the pictures of blocks to `folder`, in every format; by slug the SVG for a page."""
    pictures: dict[str, str] = {}
    for run_each in (map,) if processes is None else (processes.map, map):
        left = [block for block in blocks if block.slug not in pictures]
        try:
            for block, svg in zip(left, run_each(_save, left, repeat(folder)), strict=True):
                pictures[block.slug] = svg
                if watch is not None:
                    watch(len(pictures), len(blocks))
        except BrokenProcessPool:  # one was killed: the rest is drawn here
            continue
    return pictures


def _save(block: Drawn, folder: Path) -> str:
    from fedlens.report import draw  # here, since the process that asks needs no matplotlib

    return draw.save(block, folder)
