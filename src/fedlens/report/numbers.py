"""Formats numbers for pages and tables."""

from __future__ import annotations

import math

Cell = str | float | None
"""The content of a table cell: text, a number, or nothing."""

NONE = "–"
"""Written in a table where there is no number."""

LONG, LARGE, HUGE = 1e4, 1e6, 1e12
"""Axes have commas from LONG on, labels millions from LARGE, exponents from HUGE. See page.js."""


def format_number(value: Cell, percent: bool = False, digits: int = 1) -> str:
    """A number as it is written on a page; `digits` are the decimals of a percentage."""
    if value is None or isinstance(value, str):
        return NONE if value is None else value
    if not math.isfinite(value):
        return NONE
    if percent:
        return f"{100 * value:.{digits}f}%"
    if value and not 1e-3 <= abs(value) < HUGE:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 1000 and value != int(value) else f"{value:,.0f}"


def format_label(value: float | None, percent: bool = False, digits: int = 1) -> str:
    """A number as written next to a line or a bar: a large one in millions, with six digits."""
    if value is None or percent or not LARGE <= abs(value) < HUGE:
        return format_number(value, percent, digits)
    return format_tick(float(f"{value:.6g}"))


def format_tick(value: float) -> str:
    """A tick label of an axis, not rounded, in the same format as `tickLabel` in page.js."""
    number = float(f"{value:.12g}")
    size = abs(number)
    if size < 1000 or size >= HUGE:
        return f"{number:.12g}"
    plain = f"{number:,.8f}".rstrip("0").rstrip(".")
    unit, letter = (1e6, "M") if size < 1e9 else (1e9, "B")
    short = f"{number / unit:.12g}{letter}"
    return short if size >= LARGE and len(short) < len(plain) else plain


def format_place(x: float) -> str:
    """A position on an axis as text."""
    return f"{x:g}" if abs(x) < LARGE else format_number(x)
