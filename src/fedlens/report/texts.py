"""Texts in figures: cut to their room, and in fonts that have all of their letters."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.text import Text

NO_LETTERS = "Last Resort"  # matplotlib's fallback font, which draws a box for every character


def short(name: str, room: int) -> str:
    half = (room - 1) // 2
    return name if len(name) <= room else f"{name[:half]}…{name[-half:]}"


def shortened(names: Sequence[str], room: int) -> list[str]:
    """The names cut to `room` characters; different names stay different.

    First the settings that all names begin with are cut, then the middle of a name. If no settings
    are shared and two cut names are equal, the shared beginning is cut; names that are still equal
    get numbers.
    """
    cut = [short(name, room) for name in names]
    if cut != list(names) and len(set(names)) > 1:
        unlike = (i for i, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1)
        shared = next(unlike, min(map(len, names)))
        settings = names[0].rfind(", ", 0, shared) + 2  # end of the settings that all begin with
        if settings > 1 or len(set(cut)) < len(set(names)):
            begin = settings if settings > 1 else shared
            cut = [short(f"…{name[begin:]}" if begin > 1 else name, room) for name in names]
    places: dict[str, list[str]] = {}
    for name, one in zip(names, cut, strict=True):
        if name not in (found := places.setdefault(one, [])):
            found.append(name)
    return [
        one if len(places[one]) == 1 else f"{short(one, room - 3)} {places[one].index(name) + 1}"
        for name, one in zip(names, cut, strict=True)
    ]


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
    """Font families that together have these letters as far as possible, the best first."""
    files = {
        font.name: font.fname
        for font in sorted(fontManager.ttflist, key=lambda font: (font.name, font.fname))
        if not font.name.startswith(NO_LETTERS)
    }
    found = list[str]()
    for name in sorted(files, key=lambda name: -len(_had(files[name], letters))):
        if has := _had(files[name], letters):
            found.append(name)
            letters -= has
    return found


@cache
def _had(file: str, letters: frozenset[str]) -> frozenset[str]:
    """The subset of the letters that the font has."""
    with suppress(OSError, RuntimeError):  # deleted since matplotlib listed it, or damaged
        font = get_font(file)
        return frozenset(letter for letter in letters if font.get_char_index(ord(letter)))
    return frozenset()


@contextmanager
def any_script() -> Iterator[None]:
    """Silence matplotlib's warnings about characters that no font has: they become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        said = logging.getLogger("matplotlib.font_manager")
        level = said.level
        said.setLevel(logging.ERROR)  # else it logs every font that has no bold style
        try:
            yield
        finally:
            said.setLevel(level)
