"""Files from outside: any error while reading becomes one line with the file and a remedy."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
import shlex
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedlens.storage import free_memory

LONGEST = 300  # characters of a reason: it may quote the content of the file

MOST_UNPACKED = 1032  # times the packed size: deflate, used by gzip and zip, cannot do more
MOST_COLUMNS = 1_000  # of a csv file
SLIP = 0.8  # least similarity of a misspelling: `clinet` is one, `clinic` and `site` are not
UNPACKED_SHARE = 20  # at most 1 / 20 of the free memory: parsed text takes many times its size

Place = str | os.PathLike[str]


class BadFile(ValueError):
    """A file that cannot be read: which one, why, and what to do about it."""

    def __init__(self, file: Place, why: str, remedy: str = "take another copy") -> None:
        self.file, self.why = Path(file), why
        self.what = f"{file} cannot be read ({why})"
        super().__init__(f"{self.what}: {remedy}")


@contextmanager
def reading(file: Place, remedy: str = "take another copy") -> Iterator[None]:
    """Turn any error in the `with` block into a BadFile, unless it already names the file."""
    if never_ends(Path(file)):
        raise BadFile(file, "it is a device or a pipe", remedy)
    try:
        yield
    except Exception as error:  # broken files make decoders raise anything
        if isinstance(error, ValueError) and str(file) in str(error):
            raise
        raise BadFile(file, reason(error), remedy) from error


def never_ends(path: Path) -> bool:
    """Whether it is a device, a pipe or a socket, not a file or folder; a missing one is not."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def is_file(path: Path) -> bool:
    """Whether the file exists; False also for a name that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def digest_of(file: Path, kind: str = "sha256") -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, kind).hexdigest()


def unpacked(file: Path) -> bytes:
    """The content of a file, gunzipped if it ends in .gz; refuses more than fits into memory."""
    if file.suffix != ".gz":
        return file.read_bytes()
    most = free_memory.available() // UNPACKED_SHARE
    with gzip.open(file) as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it unpacks to more than {free_memory.in_words(most)}")
    return content


def csv_table(
    file: Path,
    needed: Sequence[str],
    remedy: str,
    optional: Sequence[str] = (),
    strict: bool = False,
) -> list[tuple[int, dict[str, str]]]:
    """The rows of a csv file, each with its line number and its cells by column, stripped.

    It has a header with all columns that are `needed`. Any other column may be there, but not one
    whose name is nearly that of a column that is needed or `optional`.
    """
    with reading(file, remedy):
        text = unpacked(file).decode("utf-8-sig")
        lines = csv.reader(io.StringIO(text, newline=""), strict=strict)
        found = []
        for cells in lines:
            if len(cells) > MOST_COLUMNS:
                raise ValueError(f"{len(cells):,} columns in line {lines.line_num}, above 1,000")
            if cells:
                found.append((lines.line_num, [cell.strip() for cell in cells]))
    if not found:
        raise ValueError(f"{file} is empty: begin it with the header {','.join(needed)}")
    (_, header), *rows = found
    _check_header(file, header, needed, optional)
    for line, cells in rows:
        if len(cells) != len(header):
            raise ValueError(
                f"{file}:{line}: {len(cells)} cells under {len(header)} columns: "
                "quote a cell that holds a comma"
            )
    if not rows:
        raise ValueError(f"{file} has a header and no rows: add one for each image")
    return [(line, dict(zip(header, cells, strict=True))) for line, cells in rows]


def _check_header(
    file: Path, header: Sequence[str], needed: Sequence[str], optional: Sequence[str]
) -> None:
    for sign, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and sign in header[0]:
            raise ValueError(f"{file}:1: {word} separate the columns: save it with commas")
    for name, times in Counter(header).items():
        if times > 1:
            raise ValueError(f"{file}:1: there are {times} columns {name!r}: rename all but one")
    known = (*needed, *optional)
    absent = [name for name in known if name not in header]
    for name in header:
        slips = get_close_matches(name, absent, n=1, cutoff=SLIP)
        if name not in known and slips:
            raise ValueError(f"{file}:1: unknown column {name!r}: did you mean {slips[0]!r}?")
    for name in needed:
        if name in absent:
            said = shortened(printable(", ".join(header)))
            raise ValueError(f"{file}:1: no column {name!r} among {said}: rename or add it")


def reason(error: BaseException) -> str:
    """The cause of an error, in a few words without a line break."""
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"it has no {shortened(str(error))}"
    if isinstance(error, ValueError) and "set_int_max_str_digits" in str(error):
        return f"it has a whole number of more than {sys.get_int_max_str_digits():,} digits"
    return shortened(next(iter(str(error).splitlines()), "")) or "it is damaged"


def shortened(text: str, longest: int = LONGEST) -> str:
    """The text, cut after `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def printable(text: str, kept: str = "") -> str:
    """A text with escaped control characters, which could write anywhere on a terminal."""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def argument(path: Place) -> str:
    """A path, quoted for a command that may be copied into a shell."""
    return shlex.quote(printable(os.fspath(path)))


def demand_text(texts: str | Sequence[str], where: str) -> None:
    """Refuse text that is not UTF-8: lone surrogates, as in file names of other encodings."""
    for text in [texts] if isinstance(texts, str) else texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where} {shortened(printable(text))} is not UTF-8: write it with other letters"
            ) from error


Fields = Mapping[str, type | tuple[type, ...]]


def demand_fields(content: Any, fields: Fields, file: Place, remedy: str) -> dict[str, Any]:
    """Return `content`; raise a BadFile unless it is a table with these fields and types."""
    if not isinstance(content, dict):
        raise BadFile(file, f"it holds {_called(content)}, not a table", remedy)
    for name, kind in fields.items():
        if name not in content:
            raise BadFile(file, f"it has no {name!r}", remedy)
        value = content[name]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadFile(file, f"its {name!r} is {_called(value)}", remedy)
    return content


def _called(value: Any) -> str:
    names = {dict: "a table", list: "a list", str: "text", int: "a number", float: "a number"}
    names |= {bool: "true or false", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)


def expanded(path: Place) -> Path:
    """The path with a leading ~ or ~user expanded to the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{path} begins with a home that is not known here: write the whole path"
        ) from error


def is_address(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def keeping_torch(package: str) -> str:
    """The command that installs a package that needs torchvision, and keeps the torch here.

    Alone, pip would take the newest torchvision, and the torch that it needs.
    """
    return f'pip install "{package}" "torch=={version("torch")}"'
