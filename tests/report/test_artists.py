"""Pictures that other processes draw: the same files, whatever becomes of the processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fedlens.report.artists import Artists, artists, save_all
from fedlens.report.blocks import FORMATS, Bars, Curves, Drawn, Line, Series
from tests.report.run_folders import make_run

BLOCKS: list[Drawn] = [
    Curves(title="Falls", lines=[Line("a", [1, 2, 3], [0.3, 0.2, 0.1])]),
    Bars(title="Stands", groups=["b"], series=[Series("b", [0.5])]),
]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_processes_draw_what_is_drawn_here_and_fail_as_it_fails_here(tmp_path):
    here = save_all(BLOCKS, tmp_path / "here")
    drawn: list[tuple[int, int]] = []
    with artists() as processes:
        there = save_all(BLOCKS, tmp_path / "there", processes, lambda *of: drawn.append(of))
        (tmp_path / "is_a_file").touch()
        with pytest.raises(OSError, match="is_a_file"):
            save_all(BLOCKS, tmp_path / "is_a_file", processes)
    assert there == here
    assert files(tmp_path / "there") == files(tmp_path / "here")
    assert len(files(tmp_path / "here")) == len(BLOCKS) * len(FORMATS)
    assert drawn == [(1, 2), (2, 2)]


class Killed(Artists):
    """Processes that are killed after the first picture."""

    def draw(self, blocks: Sequence[Drawn], folder: Path) -> Iterator[str]:
        drawn = super().draw(blocks, folder)
        yield next(drawn)
        os.killpg(self._process.pid, signal.SIGKILL)
        yield from drawn


def test_what_processes_leave_undone_is_drawn_here(tmp_path):
    drawn: list[tuple[int, int]] = []
    many = [replace(BLOCKS[0], name=f"figure_{i}") for i in range(4)]
    with closing(Killed()) as killed:
        found = save_all(many, tmp_path / "there", killed, lambda *of: drawn.append(of))
    assert found == save_all(many, tmp_path / "here")
    assert drawn == [(i + 1, len(many)) for i in range(len(many))]


def test_without_a_python_to_start_all_is_drawn_here(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with artists() as processes:
        assert processes is None


SCRIPT = """
import sys
from fedlens.cli.main import main

print("once")
sys.argv = ["fedlens", "report", sys.argv[1]]
main()
"""


def test_a_script_that_draws_needs_no_guard(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", run], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("once") == 1
    assert (run / "report.html").is_file()
