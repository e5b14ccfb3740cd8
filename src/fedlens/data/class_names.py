"""Class names, made comparable where different people wrote them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def called(name: str) -> str:
    """The name of a class or site, normalised, from the name of a folder or a label.

    Spaces at the ends are mistakes, and macOS encodes an ä differently from other systems.
    """
    return unicodedata.normalize("NFC", name).strip()


def is_number(text: str) -> bool:
    """Whether a text is a whole number from 0 that fits in 64 bits."""
    return text.isdecimal() and len(text) < 19


def rank(text: str) -> tuple[int, str]:
    """A sort key: numbers first, in numeric order, then other texts in alphabetical order."""
    return (int(text) if is_number(text) else 2**63, text)


def one_class_twice(classes: Iterable[str]) -> list[str]:
    """A warning for each pair of names that differ only in upper and lower case.

    Names of one letter are skipped: A and a may be different classes, as in handwriting.
    """
    first: dict[str, str] = {}
    pairs = [(first.setdefault(name.casefold(), name), name) for name in sorted(set(classes))]
    return [
        f"{a} and {b} are taken for two classes: give them one name if they are one"
        for a, b in pairs
        if a != b and len(a) > 1
    ]
