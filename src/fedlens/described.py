"""What keys, names and options mean, and the schema of experiments, without PyTorch.

tools/make_described.py makes the files: of the docs, and of types and functions, to import which
takes seconds.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, TypedDict

KEYS, NAMES, SCHEMA = "described.json", "named.json", "schema.json"


class Option(TypedDict):
    """An option of what is chosen by name, in words."""

    about: str
    type: str
    default: str | None  # None: it must be given


class Choice(TypedDict):
    """What can be chosen by name: what it is, in a line, and its options."""

    about: str
    options: dict[str, Option]


@cache
def descriptions() -> dict[str, str]:
    """What each key of an experiment means, in the words of the docs."""
    found: dict[str, str] = json.loads(_text(KEYS))
    return found


@cache
def choices() -> dict[str, dict[str, Choice]]:
    """By kind, as `names.KINDS` has them, and by name."""
    found: dict[str, dict[str, Choice]] = json.loads(_text(NAMES))
    return found


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of experiment files."""
    found: dict[str, Any] = json.loads(schema_text())
    return found


def schema_text() -> str:
    """The schema as editors are given it."""
    return _text(SCHEMA)


def _text(name: str) -> str:
    return (files("fedlens") / name).read_text(encoding="utf-8")
