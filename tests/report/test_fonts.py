"""Names in any script: drawn by fonts that have their letters, where there are any."""

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.font_manager import fontManager
from matplotlib.text import Text

from fedlens.report import draw, texts
from fedlens.report.blocks import Bars, Heat, Series
from fedlens.report.draw import print_style
from fedlens.report.texts import any_script

CAT, FAMILY = "\ue732", "A font of one letter"  # of the private use area: no other font has it


def look_anew():
    """Have fonts looked for as they are installed now."""
    for kept in (texts._families, texts._had):
        kept.cache_clear()


@pytest.fixture
def font(tmp_path):
    """A font with one letter, a bar, for as long as a test."""
    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    for corner in ((900, 0), (900, 300), (100, 300)):
        pen.lineTo(corner)
    pen.closePath()
    built = FontBuilder(1000, isTTF=True)
    built.setupGlyphOrder([".notdef", "cat"])
    built.setupCharacterMap({ord(CAT): "cat"})
    built.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "cat": pen.glyph()})
    built.setupHorizontalMetrics({".notdef": (1000, 0), "cat": (1000, 100)})
    built.setupHorizontalHeader(ascent=800, descent=-200)
    built.setupNameTable({"familyName": FAMILY, "styleName": "Regular", "psName": "OneLetter"})
    built.setupOS2()
    built.setupPost()
    built.save(tmp_path / "one.ttf")
    before = list(fontManager.ttflist)
    fontManager.addfont(tmp_path / "one.ttf")
    look_anew()
    yield
    fontManager.ttflist[:] = before
    look_anew()


def bars(*names):
    return Bars(title="Accuracy", groups=names, series=[Series("test", [0.5] * len(names))])


def test_letters_that_our_font_lacks_are_those_of_another(font, capfd):
    drawn = draw.pictures(bars(f"my {CAT}", "dog"))
    named = [line for line in drawn["svg"].decode().splitlines() if FAMILY in line]
    assert len(named) == 1 and CAT in named[0]
    assert b"OneLetter" in drawn["pdf"]
    assert drawn == draw.pictures(bars(f"my {CAT}", "dog"))
    assert capfd.readouterr() == ("", "")  # it has no bold letters, say


def test_without_such_a_font_there_are_boxes_and_not_a_word(capfd):
    assert draw.pictures(bars(CAT))["png"]
    assert capfd.readouterr() == ("", "")


def test_it_is_another_picture_with_the_font(request):
    boxes = draw.pictures(bars(CAT))["png"]
    request.getfixturevalue("font")
    assert draw.pictures(bars(CAT))["png"] != boxes


def test_fonts_are_looked_for_only_if_letters_are_missing(monkeypatch):
    def not_needed(_):
        raise AssertionError("no letter is missing")

    monkeypatch.setattr(texts, "_families", not_needed)
    draw.pictures(bars("cat", "Käse\nblau", "Ωmega"), {"png"})


def test_a_font_that_is_gone_is_passed_over(font, tmp_path):
    (tmp_path / "one.ttf").unlink()
    assert draw.pictures(bars(CAT), {"png"})


@pytest.mark.parametrize("length", [2, 4, 6, 30])
def test_wide_letters_have_room(length):
    name = "猫" * length
    heat = Heat(title="Shares", values=[[1.0]], row_names=[name], column_names=[name])
    for block in (bars(name), heat):
        with print_style(), any_script():
            figure = draw._figure(block)
            figure.draw_without_rendering()
        for text in figure.findobj(Text):
            if "猫" in text.get_text() and length <= 12:
                assert text.get_window_extent().x0 >= 0
