"""Consent: a run folder may be from anyone, so the code that it names runs only once approved.

Approved is what ran in a run that this user made, and what the user let run by `--trust-code`. Each
file is approved with its place and its content: if one of them changes, the user is asked again.

Errors in the user's own code: where they are, in one line.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from fedlens.storage.reading import expanded

HASH_DIGITS = 12  # of a hash in a message

trusts_all = False  # the option --trust-code

_approved: set[str] = set()  # by this process, which may not be able to write a file
_searched: dict[str, bool] = {}  # folders with own code, and whether it may run without approval


class NotApproved(ImportError, ValueError):
    """Code that is not approved; to code that tries whether a module is there, it is missing."""


class Code(NamedTuple):
    """A function by its import path, or a module, with the file that it is from."""

    name: str
    file: str | None  # of a function, that of its package
    sha256: str | None

    @classmethod
    def of(cls, name: str, file: str | None, content: bytes | None = None) -> Code:
        if file is None or not (content is not None or Path(file).is_file()):
            return cls(name, None, None)
        content = Path(file).read_bytes() if content is None else content
        return cls(name, str(Path(file).resolve()), hashlib.sha256(content).hexdigest())

    @classmethod
    def named(cls, name: str) -> Code:
        """The code of a name `module:function`, which is found without importing anything."""
        top = name.partition(":")[0].partition(".")[0]
        spec = None
        with suppress(ImportError, ValueError):  # no such name, or __main__, which always runs
            spec = find_spec(top)
        return cls.of(name, spec.origin if spec is not None and spec.has_location else None)

    def __str__(self) -> str:
        place = f" ({self.file}, sha256 {self.sha256[:HASH_DIGITS]})" if self.sha256 else ""
        return f"{self.name}{place}"


def demand_approval(where: object, codes: Iterable[Code]) -> None:
    """Raise if some of this code, which `where` names, is not approved."""
    known = _approved | set(_lines())
    if asked := [str(code) for code in codes if json.dumps(code) not in known]:
        raise NotApproved(
            f"{where} wants to run code that you have not approved, {', '.join(asked)}: look at "
            "it, and add --trust-code (from Python, trust_code=True) if you trust it"
        )


def approve(names: Iterable[str]) -> None:
    """Approve the code of names `module:function`, and the user's own modules imported so far."""
    codes = [Code.named(name) for name in names]
    if not codes:
        return
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_own(Path(file)):
            codes.append(Code.of(name, file))
    new = sorted(set(map(json.dumps, codes)) - _approved.union(_lines()))
    if not new:
        return
    _approved.update(new)
    with suppress(OSError, ValueError):  # then it holds for this process alone
        _file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _file().open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in new))


def _file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else expanded("~") / ".config") / "fedlens" / "approved_code"


def _lines() -> list[str]:
    with suppress(OSError, ValueError):
        return _file().read_text(encoding="utf-8").splitlines()
    return []


@contextmanager
def importable(*folders: Path, trusted: bool = True) -> Iterator[None]:
    """Make the modules in these folders importable; installed packages take precedence.

    Unless they are `trusted`, each must be approved. Only source files and extension modules are
    read: compiled files beside them (`__pycache__`) may have another content.
    """
    before, added = list(sys.path), []
    for folder in folders:
        place = str(folder.resolve())
        if place not in sys.path:
            sys.path.append(place)
            added.append(place)
        if place in added or place in _searched:  # others are the user's own choice
            _search(place, trusted)
    try:
        yield
    finally:
        sys.path[:] = before
        for place in added:
            _searched.pop(place, None)
            sys.path_importer_cache.pop(place, None)


def _search(place: str, trusted: bool) -> None:
    _searched[place] = trusted
    sys.path_importer_cache.pop(place, None)
    if _finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder)


def _finder(place: str) -> FileFinder:
    if place not in _searched:
        raise ImportError("not a folder of own code")
    return _Finder(place, (_Source, SOURCE_SUFFIXES), (_Extension, EXTENSION_SUFFIXES))


class _Finder(FileFinder):
    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, target)
        for place in (spec and spec.submodule_search_locations) or ():
            _search(place, _searched.get(self.path, False))
        return spec


class _Source(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        content = self.get_data(self.path)
        _demand_approved_file(fullname, self.path, content)
        return self.source_to_code(content, self.path)


class _Extension(ExtensionFileLoader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _demand_approved_file(spec.name, self.path, Path(self.path).read_bytes())
        return super().create_module(spec)


def _demand_approved_file(name: str, path: str, content: bytes) -> None:
    if not _searched.get(str(Path(path).parent), False):
        demand_approval(f"an import of {name}", [Code.of(name, path, content)])


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
