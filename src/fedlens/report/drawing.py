"""Worker processes that draw the pictures of a page.

Importing matplotlib takes longer than many runs, and drawing a page takes as long again. So a
command that will draw starts a process that imports matplotlib meanwhile, and forks one worker per
core from that process. It is a fresh Python interpreter that does not import the main script: a
script that draws needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import repeat
from pathlib import Path

from fedlens.config.consent import own_folders
from fedlens.report.blocks import Drawn
from fedlens.runs.progress import counted, shown

Draw = Callable[[Sequence[Drawn], Path], dict[str, str]]
"""Writes the pictures of blocks to a folder; returns the page's SVGs by slug."""
Process = subprocess.Popen[bytes]


@contextmanager
def drawing(progress: bool) -> Iterator[Draw]:
    """Start the processes; yield a `Draw` that uses them and shows its progress, if asked to."""
    with worker_processes() as process:

        def draw(blocks: Sequence[Drawn], folder: Path) -> dict[str, str]:
            with shown(progress, counted, "figures") as watch:
                return save_all(blocks, folder, process, watch)

        yield draw


@contextmanager
def worker_processes() -> Iterator[Process | None]:
    """The process that forks the workers, killed with them at the end; None if it cannot start."""
    places = [str(place) for place in sys.path if place not in own_folders()]
    program = (
        f"import sys; sys.path[:] = {places!r}; from fedlens.report.drawing import serve; serve()"
    )
    pipe = subprocess.PIPE
    try:
        # In a session of its own it gets no Ctrl-C, and its whole group can be killed.
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=pipe, stdout=pipe, start_new_session=True
        )
    except OSError:
        yield None
        return
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), process:  # closes the pipes and waits for the process
            pass


def save_all(
    blocks: Sequence[Drawn],
    folder: Path,
    process: Process | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> dict[str, str]:
    """Write the pictures of blocks to `folder` in every format; return the page's SVGs by slug.

    `watch` is called with the number of figures drawn and their total.
    """
    pictures: dict[str, str] = {}

    def drawn() -> Iterator[str]:
        if process is not None:
            assert process.stdin is not None and process.stdout is not None, "they are pipes"
            with suppress(EOFError, OSError, pickle.UnpicklingError):  # it was killed, or failed
                pickle.dump((list(blocks), folder.absolute()), process.stdin)
                process.stdin.flush()
                for _ in blocks:
                    yield pickle.load(process.stdout)
        for block in blocks[len(pictures) :]:  # here, which raises the error if there is one
            yield _save(block, folder)

    for block, svg in zip(blocks, drawn(), strict=True):
        pictures[block.slug] = svg
        if watch is not None:
            watch(len(pictures), len(blocks))
    return pictures


def serve() -> None:
    """The main loop of the process: draw the blocks that it receives until the pipe closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that prints do not mix with answers
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import_module("fedlens.report.draw")
    for kind in ("pdf", "svg"):
        import_module(f"matplotlib.backends.backend_{kind}")
    with suppress(Exception):  # the caller draws the rest, and gets the error there
        while True:
            blocks, folder = pickle.load(sys.stdin.buffer)
            with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as processes:
                for svg in processes.map(_save, blocks, repeat(folder)):
                    pickle.dump(svg, answers)
                    answers.flush()


def _save(block: Drawn, folder: Path) -> str:
    from fedlens.report import draw  # imported here, since the caller needs no matplotlib

    return draw.save(block, folder)
