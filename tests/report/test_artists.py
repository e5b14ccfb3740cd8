"""Pictures that other processes draw: the same files, whatever becomes of the processes."""

from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from fedlens.report.artists import artists, save_all
from fedlens.report.blocks import Bars, Curves, Line, Series
from fedlens.report.pictures import FORMATS, Drawn

BLOCKS: list[Drawn] = [
    Curves(title="Falls", lines=[Line("a", [1, 2, 3], [0.3, 0.2, 0.1])]),
    Bars(title="Stands", groups=["b"], series=[Series("b", [0.5])]),
]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_processes_draw_what_is_drawn_here(tmp_path):
    here = save_all(BLOCKS, tmp_path / "here")
    drawn: list[tuple[int, int]] = []
    with artists() as processes:
        there = save_all(BLOCKS, tmp_path / "there", processes, lambda *of: drawn.append(of))
    assert there == here
    assert files(tmp_path / "there") == files(tmp_path / "here")
    assert len(files(tmp_path / "here")) == len(BLOCKS) * len(FORMATS)
    assert drawn == [(1, 2), (2, 2)]


class Killed:
    """Processes that one is killed of, after the first picture."""

    def map(self, function: Any, blocks: Iterable[Any], folders: Iterable[Path]) -> Iterator[str]:
        for block, folder in zip(blocks, folders, strict=False):
            yield function(block, folder)
            raise BrokenProcessPool


def test_what_processes_leave_undone_is_drawn_here(tmp_path):
    drawn: list[tuple[int, int]] = []
    killed: Any = Killed()
    found = save_all(BLOCKS, tmp_path, killed, lambda *of: drawn.append(of))
    assert list(found) == [block.slug for block in BLOCKS]
    assert drawn == [(1, 2), (2, 2)]
