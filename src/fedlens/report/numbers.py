"""Numbers as pages and tables write them."""

from __future__ import annotations

import math

Cell = str | float | None
"""What stands in a table: words, a number, or nothing."""

NONE = "–"
"""Stands in a table where there is no number."""


def format_number(value: Cell, percent: bool = False, digits: int = 1) -> str:
    """A number as it is written on a page; `digits` are those of a percentage."""
    if value is None or isinstance(value, str):
        return NONE if value is None else value
    if not math.isfinite(value):
        return NONE
    if percent:
        return f"{100 * value:.{digits}f}%"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 1000 and value != int(value) else f"{value:,.0f}"


def signed_points(difference: float) -> str:
    """A difference of two shares in points, with its sign."""
    return f"{100 * difference:+.2f}".replace("-", "−")
