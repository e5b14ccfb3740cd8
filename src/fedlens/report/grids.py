"""Blocks with two axes: heat maps, tiles and contours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedlens.report.blocks import Block, Sheet, Values, sentence
from fedlens.report.numbers import Cell, format_number, format_place
from fedlens.runs.records import is_number


@dataclass(frozen=True, kw_only=True)
class Heat(Block):
    """A heat map: shades go from least to most, or with `shares` from 0, small values stretched."""

    values: Sequence[Values]  # row by row
    row_names: Sequence[str]
    column_names: Sequence[str]
    row_label: str = ""
    column_label: str = ""
    value_label: str = ""
    percent: bool = False
    digits: int = 0  # decimals of percentages in cells
    shares: bool = False
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of the cells with a frame

    def sheet(self) -> Sheet:
        corner = "/".join(filter(None, (self.row_label, self.column_label)))
        rows: list[list[Cell]] = [
            [name, *row] for name, row in zip(self.row_names, self.values, strict=True)
        ]
        return [corner, *self.column_names], rows

    def words(self) -> str:
        found = [
            (y, row, column)
            for row, values in zip(self.row_names, self.values, strict=True)
            for column, y in zip(self.column_names, values, strict=True)
            if is_number(y)
        ]
        size = (
            f"{len(self.row_names)} rows{_of(self.row_label)} and "
            f"{len(self.column_names)} columns{_of(self.column_label)}"
        )
        if not found:
            return f"Heat map of {size}, without a number."
        (low, *at_low), (high, *at_high) = min(found), max(found)
        return (
            f"Heat map of {self.value_label or self.title}: {size}, from "
            f"{format_number(low, self.percent)} ({', '.join(at_low)}) to "
            f"{format_number(high, self.percent)} ({', '.join(at_high)})."
        )


@dataclass(frozen=True, kw_only=True)
class Tiles(Block):
    """A matrix whose cells are categories (kinds), one colour each; a cell of None is empty."""

    kinds: Sequence[str]  # kind i has colour i
    values: Sequence[Sequence[str | None]]  # row by row
    row_names: Sequence[str]
    column_names: Sequence[str]
    row_label: str = ""
    column_label: str = ""

    def sheet(self) -> Sheet:
        rows: list[list[Cell]] = [
            [row, column, kind]
            for row, values in zip(self.row_names, self.values, strict=True)
            for column, kind in zip(self.column_names, values, strict=True)
            if kind is not None
        ]
        return [self.row_label or "row", self.column_label or "column", "kind"], rows

    def words(self) -> str:
        counts = self.counts()
        facts = [f"{kind}: {count:,}" for kind, count in counts.items()]
        size = f"{len(self.row_names)} rows{_of(self.row_label)} and {len(self.column_names)}"
        return f"Tiles of {size} columns{_of(self.column_label)}. {sentence(facts)}"

    def counts(self) -> dict[str, int]:
        """The number of cells of each kind that occurs."""
        found = Counter(kind for row in self.values for kind in row if kind is not None)
        return {kind: found[kind] for kind in self.kinds if found[kind]}


@dataclass(frozen=True, kw_only=True)
class Contours(Block):
    """A quantity over a plane of two numbers, with its best point marked."""

    x: Sequence[float]
    y: Sequence[float]
    z: Sequence[Values]  # z[i][j] at y[i], x[j]
    x_label: str = "x"
    y_label: str = "y"
    z_label: str = "z"
    log_x: bool = False
    log_y: bool = False
    x_names: Sequence[str] = ()  # written instead of the numbers x, which are then positions
    percent: bool = False
    lowest: bool = False  # the best is the lowest, as for a loss

    def sheet(self) -> Sheet:
        names: Sequence[Cell] = self.x_names or self.x
        rows: list[list[Cell]] = [
            [x, y, z]
            for y, row in zip(self.y, self.z, strict=True)
            for x, z in zip(names, row, strict=True)
        ]
        return [self.x_label, self.y_label, self.z_label], rows

    @property
    def best(self) -> tuple[float, float, float] | None:
        """x, y and z of the best point."""
        found = [
            (x, y, z)
            for y, row in zip(self.y, self.z, strict=True)
            for x, z in zip(self.x, row, strict=True)
            if is_number(z)
        ]
        choose = min if self.lowest else max
        return choose(found, key=lambda point: point[2], default=None)

    def words(self) -> str:
        what = f"Contours of {self.z_label} over {self.x_label} and {self.y_label}"
        if self.best is None:
            return f"{what}, without a number."
        x, y, z = self.best
        at = self.x_names[list(self.x).index(x)] if self.x_names else format_place(x)
        return (
            f"{what}. The best is {format_number(z, self.percent)}, at {self.x_label} {at} and "
            f"{self.y_label} {format_place(y)}."
        )


def _of(label: str) -> str:
    return f" ({label})" if label else ""
