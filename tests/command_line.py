"""What tests of the command line share: the experiment, and what a command ended with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

EXPERIMENT = """
dataset = "fashion-mnist-mini"
model = "linear"
rounds = 2
engine = "sequential"

[clients]
count = 30
per_round = 3
partition = { name = "dirichlet", alpha = 0.5 }
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def only_line(err: str, word: str) -> bool:
    """Whether a command said one line for people, and the word is in it."""
    return err.startswith("fedlens: ") and err.count("\n") == 1 and word in err


def forget_modules_of(folder: Path) -> None:
    """Let no later test find code that was imported from a folder."""
    inside = str(folder)
    for name, module in list(sys.modules.items()):
        about = getattr(module, "__dict__", {})
        file = about.get("__file__")
        # A package without a file looks for its folders anew, each time that it is asked.
        places = [file] if file else about.get("__path__", ())
        if any(str(place).startswith(inside) for place in places):
            del sys.modules[name]


def everything() -> dict[str, bytes]:
    """The files below this folder, but for matplotlib's list of fonts, which it makes anywhere."""
    fonts = Path("cache", "matplotlib")
    paths = (path for path in Path().rglob("*") if not path.is_relative_to(fonts))
    return {str(path): path.read_bytes() for path in paths if path.is_file()}
