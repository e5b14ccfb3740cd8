"""What classes are called, where several people wrote it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def called(name: str) -> str:
    """What a folder or a label calls its class or site.

    Spaces at the ends are mistakes, and macOS encodes an ä in another way than others do.
    """
    return unicodedata.normalize("NFC", name).strip()


def one_class_twice(classes: Iterable[str]) -> list[str]:
    """A line for each two names that differ in capitals alone.

    Those of one letter may well be meant, as A and a are in handwriting.
    """
    first: dict[str, str] = {}
    pairs = [(first.setdefault(name.casefold(), name), name) for name in sorted(set(classes))]
    return [
        f"{a} and {b} are taken for two classes: give them one name if they are one"
        for a, b in pairs
        if a != b and len(a) > 1
    ]
