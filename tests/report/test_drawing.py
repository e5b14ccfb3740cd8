"""Pictures that other processes draw: the same files, whatever becomes of the processes."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedlens.report.blocks import FORMATS, Bars, Curves, Drawn, Line, Series
from fedlens.report.drawing import save_all, worker_processes
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
    with worker_processes() as process:
        there = save_all(BLOCKS, tmp_path / "there", process, lambda *of: drawn.append(of))
        (tmp_path / "is_a_file").touch()
        with pytest.raises(OSError, match="is_a_file"):
            save_all(BLOCKS, tmp_path / "is_a_file", process)
    assert there == here
    assert files(tmp_path / "there") == files(tmp_path / "here")
    assert len(files(tmp_path / "here")) == len(BLOCKS) * len(FORMATS)
    assert drawn == [(1, 2), (2, 2)]


def test_what_processes_leave_undone_is_drawn_here(tmp_path):
    drawn: list[tuple[int, int]] = []
    many = [replace(BLOCKS[0], name=f"figure_{i}") for i in range(4)]
    with worker_processes() as process:
        assert process is not None

        def killed_after_the_first(number: int, total: int) -> None:
            drawn.append((number, total))
            if number == 1:
                os.killpg(process.pid, signal.SIGKILL)

        found = save_all(many, tmp_path / "there", process, killed_after_the_first)
    assert found == save_all(many, tmp_path / "here")
    assert drawn == [(i + 1, len(many)) for i in range(len(many))]


def test_without_a_python_to_start_all_is_drawn_here(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with worker_processes() as process:
        assert process is None


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
