"""Figures that take less time to draw."""

from collections.abc import Iterable

import pytest


def draw_svg_alone(monkeypatch: pytest.MonkeyPatch, some_picture: dict[str, bytes]) -> None:
    """Let figures be drawn as SVG; their PNG and PDF files hold some picture."""
    from fedlens.report import draw
    from fedlens.report.blocks import Drawn

    pictures = draw.pictures

    def drawn(block: Drawn, formats: Iterable[str]) -> dict[str, bytes]:
        return some_picture | pictures(block, {"svg"})

    monkeypatch.setattr(draw, "pictures", drawn)
