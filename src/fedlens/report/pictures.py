"""Which blocks are pictures. What draws them, `draw.py`, needs matplotlib; to know it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from fedlens.report.blocks import Bars, Block, Curves, Intervals, Line, Samples, Strip
from fedlens.report.grids import Contours, Heat, Tiles

Drawn = Curves | Bars | Heat | Tiles | Contours | Intervals | Strip | Samples
"""The blocks that are pictures."""

FORMATS = ("png", "svg", "pdf")
FEW = 6  # lines whose last values still fit in the margin


def is_drawn(block: Block) -> TypeGuard[Drawn]:
    """Whether a block is a picture."""
    return isinstance(block, Drawn)


def places(lines: Sequence[Line]) -> dict[str, int]:
    """By name of a line: which colour and marker it has."""
    in_turn = {name: i for i, name in enumerate(dict.fromkeys(line.name for line in lines))}
    return in_turn | {line.name: line.place for line in lines if line.place is not None}
