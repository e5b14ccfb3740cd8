"""What each key of an experiment means, in the words of the docs. It needs no PyTorch."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files


@cache
def descriptions() -> dict[str, str]:
    """By key, as described.json has them, which tools/make_described.py makes of the docs."""
    text = (files("fedlens") / "described.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)
    return found
