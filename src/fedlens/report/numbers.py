"""Numbers as pages and tables write them."""

from __future__ import annotations

import math

Cell = str | float | None
"""What stands in a table: words, a number, or nothing."""

NONE = "–"
"""Stands in a table where there is no number."""

LONG, LARGE, HUGE = 1e4, 1e6, 1e12
"""From here on axes have commas; labels are in millions; numbers have an exponent. See page.js."""


def format_number(value: Cell, percent: bool = False, digits: int = 1) -> str:
    """A number as it is written on a page; `digits` are those of a percentage."""
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
    """A number as it stands beside a line or a bar: a large one in millions, with six digits."""
    if value is None or percent or not LARGE <= abs(value) < HUGE:
        return format_number(value, percent, digits)
    return format_tick(float(f"{value:.6g}"))


def format_tick(value: float) -> str:
    """A number beside an axis, not rounded, as `tickLabel` in page.js writes it."""
    number = float(f"{value:.12g}")
    size = abs(number)
    if size < 1000 or size >= HUGE:
        return f"{number:.12g}"
    plain = f"{number:,.8f}".rstrip("0").rstrip(".")
    unit, letter = (1e6, "M") if size < 1e9 else (1e9, "B")
    short = f"{number / unit:.12g}{letter}"
    return short if size >= LARGE and len(short) < len(plain) else plain


def format_place(x: float) -> str:
    """Where on an axis something is, in words."""
    return f"{x:g}" if abs(x) < LARGE else format_number(x)


def signed_points(difference: float) -> str:
    """A difference of two shares in points, with its sign."""
    return f"{100 * difference:+.2f}".replace("-", "−")
