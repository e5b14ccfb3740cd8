"""Installed fonts for letters that ours does not have, as names in Chinese or Korean need them."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.text import Text

NO_LETTERS = "Last Resort"  # matplotlib's own, which has a box for everything


def find_letters(figure: Figure) -> None:
    """Have words drawn by other fonts, too, where the letters of theirs are not enough.

    What no font has is a box. Fonts are looked for only if there are such words.
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
    """A few families that have these letters, as far as there are any: first who has the most."""
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
    """Those of the letters that a font has."""
    with suppress(OSError, RuntimeError):  # it is gone since matplotlib listed it, or damaged
        font = get_font(file)
        return frozenset(letter for letter in letters if font.get_char_index(ord(letter)))
    return frozenset()
