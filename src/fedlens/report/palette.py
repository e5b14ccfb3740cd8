"""How lines and groups look: decided here for pages and for print, and drawn by page.js and draw.

Colours are those of page.css: print has the light ones.
"""

from __future__ import annotations

import re
from pathlib import Path

CSS = (Path(__file__).parent / "page.css").read_text("utf-8")
COLOURS: dict[str, str] = dict(re.findall(r"--([\w-]+): (#\w{6});", CSS.partition("@media")[0]))
"""The colours of a page in light mode, by their names."""
RUNS = [name for name in COLOURS if name.startswith("run-")]
"""The first four differ under every common colour blindness; markers help with more."""
MARKERS = "osD^vPX"  # as many and the colours have no common factor: places 0 to 62 differ
WIDTHS = {"solid": 1.9, "dashed": 1.1, "dotted": 1.1, "dots": 0.0, "level": 1.1}  # points
DASHES = {"solid": (), "dashed": (4.5, 2.2), "dotted": (1.2, 1.6), "dots": (), "level": (1.2, 1.6)}
"""By the style of a line: lengths of its dashes and gaps, in widths."""


def colour_of(place: int) -> str:
    """The colour for print of a line, bar or row, by the index of its name."""
    return COLOURS[RUNS[place % len(RUNS)]]


def in_page(place: int) -> str:
    """The same colour in a page, which may be dark."""
    return f"var(--{RUNS[place % len(RUNS)]})"


def marker_of(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def strokes() -> dict[str, str]:
    """How lines are drawn in a page, as CSS, by their style; a point is 1.2 pixels there."""
    return {
        style: f"stroke-width:{1.2 * width:.3g};"
        f"stroke-dasharray:{' '.join(f'{1.2 * width * dash:.2g}' for dash in DASHES[style])}"
        for style, width in WIDTHS.items()
    }
