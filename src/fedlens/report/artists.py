"""Processes that draw the pictures of a page.

To import matplotlib takes longer than many a run, and to draw a page takes as long again. So a
command that will draw has one process import it meanwhile, and those that draw are forked from that
one, as many as there are cores. It is a Python of its own, which knows nothing of the program that
started it: a script that draws needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path

from fedlens.report.pictures import Drawn

Drawing = Callable[[int, int], None]
"""Told how many figures are drawn, of how many."""


class Artists:
    """The process that others are forked from. Used by one thread, for one page after another."""

    def __init__(self) -> None:
        program = (
            f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; "
            "from fedlens.report.artists import serve; serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for who asked; and they can be killed together
        )

    def draw(self, blocks: Sequence[Drawn], folder: Path) -> Iterator[str]:
        """Write the pictures of blocks; the SVG of each, in order, of as many as can be drawn."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None, "they are pipes"
        with suppress(EOFError, OSError, pickle.UnpicklingError):  # it was killed
            pickle.dump((list(blocks), folder.absolute()), asked)
            asked.flush()
            for _ in blocks:
                yield pickle.load(answers)

    def close(self) -> None:
        """Whatever they are drawing, they leave it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self._process:  # which closes the pipes, and waits
            pass


@contextmanager
def artists() -> Iterator[Artists | None]:
    """Processes for `save_all`: they get ready at once; None where none can be started."""
    try:
        started = Artists()
    except OSError:
        yield None
        return
    try:
        yield started
    finally:
        started.close()


def save_all(
    blocks: Sequence[Drawn],
    folder: Path,
    artists: Artists | None = None,
    watch: Drawing | None = None,
) -> dict[str, str]:
    """Write the pictures of blocks to `folder`, in every format; by slug the SVG for a page."""
    pictures: dict[str, str] = {}

    def keep(drawn: Iterator[str], of: Sequence[Drawn]) -> None:
        for block, svg in zip(of, drawn, strict=False):
            pictures[block.slug] = svg
            if watch is not None:
                watch(len(pictures), len(blocks))

    if artists is not None:
        keep(artists.draw(blocks, folder), blocks)
    left = blocks[len(pictures) :]  # drawn here, which also shows what was wrong
    keep(map(_save, left, repeat(folder)), left)
    return pictures


def serve() -> None:
    """What the process of `Artists` does: draw what it is sent, until there is nobody to ask."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anybody prints is no answer
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from importlib import import_module

    for name in (
        "fedlens.report.draw",
        *map("matplotlib.backends.backend_{}".format, ("pdf", "svg")),
    ):
        import_module(name)
    with suppress(Exception):  # who asked draws the rest, and finds out what is wrong
        while True:
            blocks, folder = pickle.load(sys.stdin.buffer)
            with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as processes:
                for svg in processes.map(_save, blocks, repeat(folder)):
                    pickle.dump(svg, answers)
                    answers.flush()


def _save(block: Drawn, folder: Path) -> str:
    from fedlens.report import draw  # here, since the process that asks needs no matplotlib

    return draw.save(block, folder)
