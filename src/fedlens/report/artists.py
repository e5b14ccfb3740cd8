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
from itertools import repeat
from pathlib import Path

from fedlens.config.consent import own_folders
from fedlens.report.blocks import Drawn

Drawing = Callable[[int, int], None]
"""A callback that gets the number of figures drawn and their total."""


class Artists:
    """The process that forks the workers. Not thread-safe: it draws one page after another."""

    def __init__(self) -> None:
        places = [str(place) for place in sys.path if place not in own_folders()]
        program = (
            f"import sys; sys.path[:] = {places!r}; "
            "from fedlens.report.artists import serve; serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # it gets no Ctrl-C, and `close` can kill the whole group
        )

    def draw(self, blocks: Sequence[Drawn], folder: Path) -> Iterator[str]:
        """Write the pictures of blocks and yield their SVGs in order; stop at a failure."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None, "they are pipes"
        with suppress(EOFError, OSError, pickle.UnpicklingError):  # the process was killed
            pickle.dump((list(blocks), folder.absolute()), asked)
            asked.flush()
            for _ in blocks:
                yield pickle.load(answers)

    def close(self) -> None:
        """Kill the process and its workers, even while they draw."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self._process:  # closes the pipes and waits for the process
            pass


@contextmanager
def artists() -> Iterator[Artists | None]:
    """Start the processes for `save_all` and close them at the end; None if they cannot start."""
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
    """Write the pictures of blocks to `folder` in every format; return the page's SVGs by slug."""
    pictures: dict[str, str] = {}

    def drawn() -> Iterator[str]:
        if artists is not None:
            yield from artists.draw(blocks, folder)
        for block in blocks[len(pictures) :]:  # here, which raises the error if there is one
            yield _save(block, folder)

    for block, svg in zip(blocks, drawn(), strict=True):
        pictures[block.slug] = svg
        if watch is not None:
            watch(len(pictures), len(blocks))
    return pictures


def serve() -> None:
    """The main loop of the `Artists` process: draw the blocks it receives until the pipe closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that prints do not mix with answers
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from importlib import import_module

    for name in (
        "fedlens.report.draw",
        *map("matplotlib.backends.backend_{}".format, ("pdf", "svg")),
    ):
        import_module(name)
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
