"""Which blocks are pictures. Unlike `draw.py`, which draws them, this needs no matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from fedlens.report.blocks import Bars, Block, Curves, Intervals, Line, Samples, Strip
from fedlens.report.grids import Contours, Heat, Tiles

Drawn = Curves | Bars | Heat | Tiles | Contours | Intervals | Strip | Samples
"""The blocks that are pictures."""

FORMATS = ("png", "svg", "pdf")
FEW = 6  # up to this many lines, their last values fit in the margin


def is_drawn(block: Block) -> TypeGuard[Drawn]:
    """Whether a block is a picture."""
    return isinstance(block, Drawn)


def places(lines: Sequence[Line]) -> dict[str, int]:
    """The index of the colour and marker of each line, by the line's name."""
    in_turn = {name: i for i, name in enumerate(dict.fromkeys(line.name for line in lines))}
    return in_turn | {line.name: line.place for line in lines if line.place is not None}
