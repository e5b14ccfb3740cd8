"""What keys, names and options mean, and the schema of experiments, without PyTorch.

tools/make_described.py writes the files, from the docs and from types and functions whose import
takes seconds.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, TypedDict

KEYS, NAMES, SCHEMA = "described.json", "named.json", "schema.json"


class Option(TypedDict):
    """An option of something that is chosen by name, in words."""

    about: str
    type: str
    default: str | None  # None: it must be given


class Choice(TypedDict):
    """Something that can be chosen by name: a description of one line, and its options."""

    about: str
    options: dict[str, Option]


@cache
def descriptions() -> dict[str, str]:
    """What each key of an experiment means, in the words of the docs."""
    found: dict[str, str] = json.loads(_text(KEYS))
    return found


@cache
def choices() -> dict[str, dict[str, Choice]]:
    """All that can be chosen by name, by kind (the keys of `names.KINDS`) and name."""
    found: dict[str, dict[str, Choice]] = json.loads(_text(NAMES))
    return found


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of experiment files."""
    found: dict[str, Any] = json.loads(schema_text())
    return found


def schema_text() -> str:
    """The JSON Schema as text, as editors read it."""
    return _text(SCHEMA)


def _text(name: str) -> str:
    return (files("fedlens") / name).read_text(encoding="utf-8")
