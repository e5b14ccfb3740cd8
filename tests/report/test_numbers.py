"""Numbers of a million and more in figures."""

from __future__ import annotations

from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from fedlens.report.blocks import (
    Bars,
    Contours,
    Curves,
    Drawn,
    Intervals,
    Line,
    Marks,
    Series,
    Strip,
)
from fedlens.report.draw import _figure, print_style
from fedlens.report.numbers import format_label, format_number, format_tick

FAR = [0.0, 500_000.0, 1_000_000.0]
NEAR = [12_345_600.0, 12_345_650.0, 12_345_699.0]
OUTSIDE = "a name of twenty-two l"  # the longest that stands beside a bar

LARGE: list[Drawn] = [
    Curves(title="far", lines=[Line("a", FAR, [1e6, 1.03e6, 1.05e6]), Line("b", FAR, FAR)]),
    Curves(title="near", lines=[Line("a", NEAR, NEAR)]),
    Curves(title="below", lines=[Line("a", [0.0, 800_000.0], [0.0, -1_234_567.8])]),
    Curves(title="rounds", lines=[Line("a", [100_000, 100_002], [0.5, 0.75])]),
    Curves(title="log", lines=[Line("a", [1, 1e4, 1e7], [1, 1e6, 2e9])], log_x=True, log_y=True),
    Curves(title="huge", lines=[Line("a", [0, 1], [1e13, 3.3e14])]),
    Bars(title="bars", groups=["a", OUTSIDE], series=[Series("s", [1e6, 1_234_567.0])]),
    Bars(title="±", groups=[OUTSIDE], series=[Series("s", [1_234_567.0], [1_234_567.0])]),
    Bars(title="minus", groups=["a", "b"], series=[Series("s", [-1.5e6, 1.05e6])]),
    Strip(title="strip", groups=[("a", [-1e6, 1.2e6, 3e6])]),
    Intervals(title="intervals", rows=["a"], series=[Marks("s", [1e6], [9e5], [1.2e6])]),
    Contours(title="grid", x=FAR, y=[1e6, 1.05e6], z=[[1e6, 2e6, 3e6]] * 2, y_label="bytes"),
]


def drawn(block: Drawn) -> Figure:
    with print_style():
        figure = _figure(block)
        figure.canvas.draw()
    return figure


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("block", LARGE, ids=lambda block: block.title)
def test_large_numbers_of_a_figure_are_whole_and_apart(block: Drawn) -> None:
    figure = drawn(block)
    (axes,) = figure.axes
    for axis in (axes.xaxis, axes.yaxis):
        assert axis.get_offset_text().get_text() == "", "no 1e6 stands at the end of an axis"
        box = axis.get_tightbbox()
        assert box is None or (box.x0 >= 0 and box.x1 <= figure.bbox.width)
    for text in axes.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width, f"{text.get_text()} is cut off"
    low, high = axes.get_xlim()
    ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    along = [label.get_window_extent() for x, label in ticks if low <= x <= high]
    assert all(a.x1 < b.x0 for a, b in pairwise(along)), "one runs into the next"


def test_axes_of_figures_have_the_numbers_of_pages() -> None:
    (axes,) = drawn(LARGE[0]).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()][1:-1] == ["0", "500,000", "1M"]
    assert {"0", "200,000", "1M"} <= {tick.get_text() for tick in axes.get_yticklabels()}
    told = [format_tick(x) for x in (0.1 + 0.2, 5e3, 1e6, 1.05e6, 12_345_699, -2e6, 2e9, 1e30)]
    assert told == ["0.3", "5,000", "1M", "1.05M", "12,345,699", "-2M", "2B", "1e+30"]


def test_no_round_is_between_two_rounds() -> None:
    (axes,) = drawn(LARGE[3]).axes
    assert all(x == int(x) for x in axes.get_xticks())


def test_axes_below_ten_thousand_are_as_matplotlib_has_them() -> None:
    (axes,) = drawn(Curves(title="x", lines=[Line("a", [0, 5000], [0.5, 2.25])])).axes
    assert "5000" in [tick.get_text() for tick in axes.get_xticklabels()]
    assert "0.5" in [tick.get_text() for tick in axes.get_yticklabels()]


def test_labels_of_lines_and_bars_tell_large_numbers_apart() -> None:
    assert labels(drawn(LARGE[0])) == ["1M", "1.05M"]
    bars = Bars(title="x", groups=["a", "b"], series=[Series("s", [1e6, 1.05e6], [2e6, 5e5])])
    assert {"1M ± 2M", "1.05M ± 500,000"} <= set(labels(drawn(bars)))
    assert bars.words().endswith("a: 1M ± 2M; b: 1.05M ± 500,000.")
    assert "12,345,699 at round 12,345,699" in LARGE[1].words()
    assert labels(drawn(LARGE[10])) == ["a", "1M (900,000 to 1.2M)"]


def test_labels_of_other_numbers_are_those_of_tables() -> None:
    for value in (None, 0.0, 0.12345, -3.0, 1e-5, 1234.5, 999_999.0, 1e12, float("inf")):
        assert format_label(value) == format_number(value)
    assert format_label(0.7151, percent=True, digits=2) == "71.51%"
