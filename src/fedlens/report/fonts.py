"""Finds installed fonts for characters that our font lacks, such as Chinese or Korean ones."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.text import Text

NO_LETTERS = "Last Resort"  # matplotlib's fallback font, which draws a box for every character


def find_letters(figure: Figure) -> None:
    """Add fallback fonts to texts whose own font lacks some of their characters.

    A character that no font has is drawn as a box. Fonts are searched only if one is missing.
    """
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        words = text.get_text()
        if words.isascii():
            continue
        letters = frozenset(words) - frozenset("\n")
        missing = letters - _had(findfont(text.get_fontproperties()), letters)
        if missing and (others := _families(missing)):
            text.set_fontfamily([*text.get_fontfamily(), *others])


@cache
def _families(letters: frozenset[str]) -> list[str]:
    """Font families that together cover these letters as far as possible, the best first."""
    files = {
        font.name: font.fname
        for font in sorted(fontManager.ttflist, key=lambda font: (font.name, font.fname))
        if not font.name.startswith(NO_LETTERS)
    }
    left, found = letters, list[str]()
    while left:
        have = {name: _had(file, left) for name, file in files.items()}
        best = max(have, key=lambda name: len(have[name]), default="")
        if not best or not have[best]:
            break
        found.append(best)
        left -= have[best]
    return found


@cache
def _had(file: str, letters: frozenset[str]) -> frozenset[str]:
    """The subset of the letters that the font has."""
    with suppress(OSError, RuntimeError):  # deleted since matplotlib listed it, or damaged
        font = get_font(file)
        return frozenset(letter for letter in letters if font.get_char_index(ord(letter)))
    return frozenset()
