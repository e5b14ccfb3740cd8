"""Errors in the user's own code: where they are, in one line."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS = Path(__file__).resolve().parents[1]
LIBRARIES = tuple(
    Path(place).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (place := sysconfig.get_path(name))
)

MADE = "__getattr__|exec|globals|locals|setattr|vars"
"""By these, a module may have names that its text does not show."""


def mistake_of(error: BaseException) -> str:
    """One line about an error that the user has to fix, or "" for any other error.

    The user has to fix a ValueError, as everywhere, and any error raised in the user's own files.
    """
    if isinstance(error, ValueError):
        return str(error)
    where = place_of_error(error)
    return f"{where}: fix it there" if where else ""


def place_of_error(error: BaseException) -> str:
    """Where in the user's own code an error was raised, and the error; "" if elsewhere."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        # A worker may have been sent the code, and not have the file.
        is_python = file.is_file() or (file.is_absolute() and file.suffix == ".py")
        if not is_python or _is_library(file):
            continue
        if _is_in(file, (OURS,)):
            return ""
        what = next(iter(str(error).splitlines()), "")
        raised = f"{type(error).__name__}: {what}" if what else type(error).__name__
        return f"{file.name}, line {frame.lineno}, in {frame.name}: {raised}"
    return ""


def why_not_imported(error: BaseException) -> str:
    """Why a module was not imported, in brackets, and what to do: fix it, or name another."""
    where = place_of_error(error)
    why = where or next(iter(str(error).splitlines()), type(error).__name__)
    if where or isinstance(error, SyntaxError):  # a SyntaxError names its place itself
        return f"({why}): fix it there"
    return f"({why}): write module:function, with the module beside the experiment or on PYTHONPATH"


def lacks(module: str, name: str) -> bool:
    """Whether the text of a module shows that it has no such name.

    It is read first, since to import it may also import PyTorch, which takes seconds.
    """
    spec = None if module in sys.modules else find_spec(module)
    if not name.isidentifier() or spec is None or not str(spec.origin).endswith(".py"):
        return not name.isidentifier()
    text = Path(str(spec.origin)).read_text(encoding="utf-8", errors="replace")
    return not re.search(rf"\b({name}|{MADE})\b|import +\*", text)


def place_of(thing: Any) -> str:
    """Where a function, or the class of an object, is defined, as `name (own.py, line 9)`."""
    written = inspect.unwrap(thing) if inspect.isroutine(thing) else type(thing)
    try:
        file, line = inspect.getsourcefile(written), inspect.getsourcelines(written)[1]
    except (OSError, TypeError):  # it was typed into an interpreter
        return str(written.__name__)
    return f"{written.__name__} ({Path(file or '?').name}, line {line})"


def is_own(file: Path) -> bool:
    """Whether the user wrote a file: it exists, and is neither of Fedlens nor of a library."""
    return not _is_library(file) and not _is_in(file, (OURS,)) and file.is_file()


def _is_library(file: Path) -> bool:
    # A virtual environment may also use the packages of the system.
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts) or _is_in(file, LIBRARIES)


def _is_in(file: Path, folders: tuple[Path, ...]) -> bool:
    place = file.resolve()
    return any(place.is_relative_to(folder) for folder in folders)
