import csv
import io
import itertools
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from PIL import Image

from fedlens.report import render_page
from fedlens.report.blocks import (
    FORMATS,
    Bars,
    Contours,
    Curves,
    Facts,
    Heat,
    Intervals,
    Line,
    Marks,
    Series,
    Strip,
    Table,
    Text,
)
from fedlens.report.draw import HEIGHT, _figure, name_ends, pictures, print_style, sheet
from fedlens.report.numbers import format_number
from fedlens.report.page import _classes, csv_of, html
from fedlens.report.palette import colour_of
from fedlens.report.texts import shortened

CURVES = Curves(
    title="Accuracy & loss",
    caption="Two lines.",
    lines=[
        Line("ours", [1, 2, 3], [0.1, None, 0.3], [0.0, None, 0.2], [0.2, None, 0.4]),
        Line("theirs", [1, 3], [0.2, math.nan], style="dashed"),
    ],
    percent=True,
    levels=[("chance", 0.1)],
)
BARS = Bars(
    title="Bars",
    groups=["iid", "a group with a name that does not fit beside its bars"],
    series=[
        Series("ours", [0.5, None], [0.1, None]),
        Series("published", [0.6, -0.1], hollow=True),
    ],
)
HEAT = Heat(
    title="Heat",
    values=[[0.0, 0.5], [math.nan, 1.0]],
    row_names=["cat", "dog"],
    column_names=["0", "1"],
    percent=True,
)
CONTOURS = Contours(
    title="Grid", x=[0.1, 1, 10], y=[1, 2], z=[[0.1, 0.2, None], [0.3, 0.9, 0.4]], log_x=True
)
STRIP = Strip(title="Strip", groups=[("a", [1.0, 2.0, 4.0]), ("nobody", [])], x_label="EMD")
TABLE = Table(
    title="Table",
    header=["method", "published", "ours"],
    rows=[["FedAvg", "70.1%", 0.5], ["FedProx", None, 0.25]],
    strong=frozenset({(0, 2)}),
    published=frozenset({1}),
)
INTERVALS = Intervals(
    title="Intervals",
    rows=["north", "south"],
    series=[
        Marks("federated", [0.9, None], [0.8, None], [1.0, None]),
        Marks("alone", [0.5, 0.25], [0.4, None], [0.6, None]),
    ],
    percent=True,
    faint=frozenset({1}),
)
FACTS = Facts(title="Facts", facts={"final accuracy": "62.5%", "status": "finished"})
DRAWN = [CURVES, BARS, HEAT, CONTOURS, STRIP, INTERVALS]


@pytest.mark.parametrize("block", DRAWN, ids=lambda block: block.title)
def test_every_figure_is_drawn_in_every_format_and_always_the_same(block):
    files = pictures(block)
    assert files == pictures(block)
    with Image.open(io.BytesIO(files["png"])) as image:
        assert image.width > 900 and len(image.getcolors(1 << 20) or ()) > 10
    assert files["pdf"].startswith(b"%PDF")
    assert b"<svg" in files["svg"]


@pytest.mark.parametrize(
    "empty",
    [
        Curves(title="x", lines=[]),
        Curves(title="x", lines=[Line("a", [1], [None])], log_y=True),
        Bars(title="x", groups=[], series=[]),
        Bars(title="x", groups=["a"], series=[Series("s", [None])]),
        Heat(title="x", values=[[None]], row_names=["a"], column_names=["b"]),
        Contours(title="x", x=[1], y=[1], z=[[None]]),
        Strip(title="x", groups=[]),
        Intervals(title="x", rows=[], series=[]),
        Intervals(title="x", rows=["a"], series=[Marks("s", [None], [None], [None])]),
    ],
    ids=lambda block: type(block).__name__,
)
def test_a_block_without_a_number_is_drawn_too(empty):
    assert set(pictures(empty)) == set(FORMATS)
    assert empty.words()


def test_words_tell_what_there_is_to_see():
    assert CURVES.words() == (
        "Line chart of Accuracy & loss by round. ours: 10.0% at round 1, 30.0% at round 3; "
        "theirs: 20.0% at round 1, 20.0% at round 1; chance: 10.0%."
    )
    assert "iid, ours: 0.500 ± 0.100; iid, published: 0.600" in BARS.words()
    assert HEAT.words().endswith("from 0.0% (cat, 0) to 100.0% (dog, 1).")
    assert "The best is 0.900, at x 1 and y 2." in CONTOURS.words()
    assert "a: 3 dots from 1 to 4, median 2" in STRIP.words()
    assert "north, federated: 90.0% (80.0% to 100.0%)" in INTERVALS.words()
    assert INTERVALS.words().endswith("south, alone: 25.0%.")


def test_of_a_grid_only_what_was_measured_is_drawn():
    row = _figure(Contours(title="x", x=[1, 2, 3], y=[3, 4], z=[[0.25, 0.5, None], [None] * 3]))
    (axes,) = row.axes
    assert np.asarray(axes.collections[0].get_offsets()).tolist() == [[1, 3], [2, 3]]
    assert {text.get_text() for text in axes.texts} == {"0.250", "0.500"}
    assert (axes.get_xlim()[1] > 3, axes.get_ylim()[1] > 4) == (True, True), "of the whole grid"


def test_long_names_with_notes_stay_unlike_in_a_legend():
    names = [f"fedavg, a setting {k} that is long, and another one" for k in range(3)]
    lines = [Line(name, [1, 2], [0.1, 0.2], note="best 20.0% (round 2)") for name in names]
    (legend,) = _figure(Curves(title="x", lines=lines)).legends
    assert len({text.get_text() for text in legend.get_texts()}) == 3


def test_places_of_a_grid_may_have_names():
    """In the figure, in its data and in words."""
    grid = Contours(title="x", x=[1, 2], y=[3, 4], z=[[0.5, 0.2], [0.9, 0.1]], x_names=["a", "b"])
    (axes,) = _figure(grid).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a", "b"]
    assert [row[0] for row in grid.sheet()[1]] == ["a", "b", "a", "b"]
    assert "at x a and y 4" in grid.words()


def test_bands_of_a_grid_are_narrow_where_most_points_are_alike():
    """One run that failed does not put all the others into one band."""
    z = [[0.1, 0.91, 0.92], [0.93, 0.94, 0.95], [0.96, 0.97, 0.98]]
    (axes,) = _figure(Contours(title="x", x=[1, 2, 3], y=[1, 2, 3], z=z, percent=True)).axes
    bands: Any = axes.collections[0]
    assert np.allclose(bands.levels, sorted(np.ravel(z)))
    assert {text.get_text() for text in axes.texts} >= {"10.0", "91.0", "98.0"}


def test_no_number_of_a_grid_stands_over_its_axes_where_a_page_would_cut_it():
    z = [[0.5, 0.6], [0.7, 0.8]]
    figure = _figure(Contours(title="x", x=[1, 2], y=[1, 2], z=z))
    (axes,) = figure.axes
    top = axes.get_window_extent().y1
    assert len(axes.texts) == 4
    assert all(text.get_window_extent().y1 <= top for text in axes.texts)


def test_the_data_behind_a_block_are_its_csv():
    rows = list(csv.reader(io.StringIO(csv_of(CURVES).decode())))
    assert rows[0] == ["line", "style", "round", "y", "low", "high"]
    assert rows[1] == ["ours", "solid", "1", "0.1", "0.0", "0.2"]
    assert len(rows) == 6
    assert csv_of(HEAT).decode().splitlines()[1:] == ["cat,0.0,0.5", "dog,nan,1.0"]
    assert csv_of(CONTOURS).decode().splitlines()[0] == "x,y,z"


def test_numbers_are_written_at_a_readable_length():
    told = [
        format_number(x) for x in (0.12345, 3.0, 1234567.0, 1e-5, 12345.6, None, math.inf, "word")
    ]
    assert told == ["0.123", "3", "1,234,567", "1.0e-05", "12,346", "–", "–", "word"]
    assert format_number(0.7151, percent=True) == "71.5%"


def test_a_page_has_every_block_and_its_files(tmp_path):
    blocks = [
        *DRAWN,
        FACTS,
        TABLE,
        Text(title="Notes", paragraphs=["One.", "Two <b>."], code="a = 1"),
    ]
    page = render_page("Title", "Summary.", blocks, tmp_path).read_text("utf-8")
    files = {path.name for path in (tmp_path / "figures").iterdir()}
    for block in DRAWN:
        assert {f"{block.slug}.{kind}" for kind in (*FORMATS, "csv")} <= files
        assert re.search(rf'<figure class="card( wide)?" id="{block.slug}"', page)
        assert f"<h2>{block.title.replace('&', '&amp;')}</h2>" in page
        assert f'<a href="#{block.slug}">' in page, "a long page has a list of its contents"
    assert "table.csv" in files and "notes.csv" not in files
    assert page.count('href="data:text/csv;base64,') == 8
    assert "<strong>0.500</strong>" in page and 'class="published">70.1%</td>' in page
    assert "Two &lt;b&gt;." in page and "<pre>a = 1</pre>" in page


def test_a_name_in_a_table_goes_on_in_the_next_line_but_never_within_a_number(tmp_path):
    table = Table(title="t", header=["run"], rows=[["lr=0.03,seed=0"], ["partition.alpha"]])
    page = render_page("Page", "", [table], tmp_path).read_text()
    assert "lr=0.03,<wbr>seed=0" in page and "partition.<wbr>alpha" in page


def test_no_line_of_a_page_ends_within_an_option(tmp_path):
    text = Text(title="x", paragraphs=("more with --seeds, 1 <-- 2, a--b",))
    page = render_page("x", "", [text], tmp_path).read_text("utf-8")
    assert 'more with <span class="option">--seeds</span>, 1 &lt;-- 2, a--b' in page


def test_blocks_of_one_title_have_files_of_their_own(tmp_path):
    render_page("x", "", [TABLE, TABLE], tmp_path)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"table.csv", "table_2.csv"}


def test_only_files_of_an_earlier_page_are_removed(tmp_path):
    render_page("x", "", [STRIP, HEAT], tmp_path)
    (tmp_path / "figures" / "mine.png").touch()
    render_page("x", "", [HEAT], tmp_path)
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert "mine.png" in names and "heat.png" in names and "strip.png" not in names


def test_names_cannot_break_out_of_the_data_in_a_page(tmp_path):
    evil = "</script><script>alert(1)</script>"
    page = render_page(evil, evil, [Curves(title=evil, lines=[Line(evil, [1], [1])])], tmp_path)
    assert "<script>alert" not in page.read_text("utf-8")
    (digest,) = re.findall(r"script-src '(sha256-[^']+)'", page.read_text("utf-8"))
    assert len(digest) == 51


def test_long_lines_are_thinned_in_the_page_but_not_in_their_data(tmp_path):
    long = Curves(title="long", lines=[Line("a", range(10_001), [0.5] * 10_001)])
    page = render_page("x", "", [long], tmp_path).read_text("utf-8")
    (xs,) = re.findall(r'"x":\[([\d,]+)\]', page)
    assert 1000 < len(xs.split(",")) <= 2001 and xs.endswith(",10000")
    assert (tmp_path / "figures" / "long.csv").read_text().count("\n") == 10_002


def test_the_data_of_a_page_keep_the_digits_of_large_numbers_only(tmp_path):
    large, small = [12345600.0, 12345650.0, 12345699.0], [0.123456789, 2.30258509, 123456.789]
    curves = Curves(title="x", lines=[Line("a", [1, 2, 3], large), Line("b", [1, 2, 3], small)])
    page = render_page("x", "", [curves], tmp_path).read_text("utf-8")
    (chart,) = re.findall(r'(\{"x_label".*?)</script>', page)
    told = [line["y"] for line in json.loads(chart)["lines"]]
    assert told == [large, [0.123457, 2.30259, 123457.0]]


def test_data_too_large_for_a_page_are_in_the_file_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlens.report.page.MOST_BYTES", 20)
    page = render_page("a page", "", [HEAT], tmp_path).read_text()
    assert f'href="figures/{HEAT.slug}.csv"' in page and "data:text/csv" not in page
    assert (tmp_path / "figures" / f"{HEAT.slug}.csv").is_file()
    live = html("a page", "", [HEAT], lambda _: "", live="yes")
    assert "data:text/csv" in live, "beside which there is no file"


def test_the_axis_of_a_wide_heat_map_counts_all_of_its_columns():
    names = [str(k) for k in range(4000)]
    wide = Heat(title="wide", values=[[0.5] * 4000], row_names=["a"], column_names=names)
    assert _figure(wide).axes[0].get_xlim() == (-0.5, 3999.5)
    assert _figure(HEAT).axes[0].get_xlim() == (-0.5, len(HEAT.column_names) - 0.5)


def test_no_cell_of_a_csv_file_is_a_formula() -> None:
    rows: list[list[str | float | None]] = [
        ["=1+1", "-0.5 ± 0.1"],
        ["@SUM(A1)", "-3%"],
        ["+x", -2.0],
        ["\tx", None],
        ["a=b", "-1e-05"],
    ]
    table = Table(title="t", header=["=h", "ok"], rows=rows)
    assert list(csv.reader(io.StringIO(csv_of(table).decode()))) == [
        ["'=h", "ok"],
        ["'=1+1", "-0.5 ± 0.1"],
        ["'@SUM(A1)", "-3%"],
        ["'+x", "-2.0"],
        ["'\tx", ""],
        ["a=b", "-1e-05"],
    ]


@pytest.mark.parametrize("num_points", [2000, 2001, 4000, 1_000_000])
def test_long_curves_are_thinned_by_the_rule_that_the_caption_states(num_points: int) -> None:
    line = Line("a", range(num_points), [0.5] * num_points, low=[0.4] * num_points)
    curves = Curves(title="t", caption="All.", lines=[line, Line("b", [1, 2], [3, 4])])
    thin = curves.thinned()
    if num_points == 2000:
        assert thin == curves
        return
    long, short = thin.lines
    assert long.x[0] == 0 and long.x[-1] == num_points - 1
    assert 1000 <= len(long.x) <= 2000 and len(long.x) == len(long.y) == len(long.low or ())
    step = long.x[1]
    assert list(long.x[:-1]) == list(range(0, num_points - 1, int(step)))
    assert thin.caption == f"All. Of up to {num_points:,} points a line, one in {step} is drawn."
    assert short == curves.lines[1]
    assert thin.alt == curves.words()


def test_names_that_are_cut_stay_apart():
    names = [f"lr=0.003,algorithm=fedavg,momentum={m},seed=0" for m in ("0.25", "0.75", "0.9")]
    for room in (24, 12):
        cut = shortened(names, room)
        assert len(set(cut)) == 3 and max(map(len, cut)) <= room
    alike = ["x" * 30 + middle + "y" * 30 for middle in "abc"]
    assert len(set(shortened(alike, 16))) == 3
    assert shortened(["a", "a", "b"], 8) == ["a", "a", "b"]


def axes_of(block):
    with print_style():
        return _figure(block).axes[0]


def test_no_axis_of_accuracies_goes_beyond_100_percent():
    """Bands may: of a mean of 97%, one standard deviation above it."""
    line = Line("a", [1, 2], [0.9, 0.97], low=[0.8, 0.85], high=[1.0, 1.3])
    low, high = axes_of(Curves(title="x", lines=[line], percent=True)).get_ylim()
    assert 0.97 < high < 1.01 and low >= 0
    relative = axes_of(Curves(title="x", lines=[Line("a", [1, 2], [0.9, 1.2])], percent=True))
    assert relative.get_ylim()[1] > 1.2, "a relative accuracy may be above that of the twin"
    bars = axes_of(Bars(title="x", groups=["a"], series=[Series("s", [0.8])], percent=True))
    assert bars.get_xticks().max() == 1.0, "a bar of 80% does not fill its axis"


def test_a_legend_shows_lines_as_they_are_drawn():
    published = Line("a", [1, 2], [0.1, 0.2], style="dashed")
    block = Curves(title="x", lines=[published, Line("a", [1, 2], [0.2, 0.3]), Line("b", [1], [1])])
    with print_style():
        figure = _figure(block)
    (legend,) = figure.legends
    handles = [one for one in legend.legend_handles if isinstance(one, Line2D)]
    assert len(handles) == 2
    drawn = {line.get_color(): line for line in figure.axes[0].lines if line.get_linestyle() == "-"}
    for handle in handles:
        line = drawn[handle.get_color()]
        assert handle.get_linestyle() == "-" and handle.get_linewidth() == line.get_linewidth()


def test_a_line_that_is_off_is_not_drawn_but_is_in_the_data():
    block = Curves(title="x", lines=[Line("a", [1], [1.0]), Line("b", [1], [2.0], off=True)])
    assert len(axes_of(block).lines) == 1
    assert [row[0] for row in block.sheet()[1]] == ["a", "b"]


def test_figures_stand_two_by_two_behind_the_one_that_leads(tmp_path):
    page = render_page("x", "", [HEAT, BARS, STRIP, CURVES, TABLE, CONTOURS], tmp_path)
    found = re.findall(r'<figure class="card( wide)?" id="([a-z_]+)"', page.read_text("utf-8"))
    wide = [name for is_wide, name in found if is_wide]
    assert wide == ["heat", "accuracy_loss", "grid"]  # leads; has no partner; stands alone


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_last_values_in_the_margin_never_overlap(values: list[float]) -> None:
    _, axes = sheet("", HEIGHT, below=0.5)
    axes.set_ylim(0, 1)
    name_ends(axes, [(value, "50.0%", colour_of(0)) for value in values])
    texts = [text for text in axes.texts if isinstance(text, Annotation)]
    heights = sorted(text.xy[1] * HEIGHT * 72 for text in texts)
    assert len(heights) == len(values)
    assert all(b - a >= 10.4 for a, b in itertools.pairwise(heights))
    assert heights[0] >= -0.1 and heights[-1] <= HEIGHT * 72 + 0.1


def test_a_column_of_numbers_stays_one_where_a_run_diverged():
    table = Table(title="t", caption="", header=("a", "b", "c"), rows=[["x", "80.1", "y"]] * 2)
    cells = [["x", "80.12", "fast"], ["x", "diverged in round 1,234", "diverged"]]
    assert _classes(table, cells) == ["words", "", "words"]
