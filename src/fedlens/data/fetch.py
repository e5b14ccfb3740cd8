"""Fetch published data sets, and check those on this machine."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fedlens.config.names import DATASETS
from fedlens.config.options import did_you_mean
from fedlens.data import store
from fedlens.data.curation import SETS
from fedlens.data.folders import tiny_imagenet_contents
from fedlens.data.places import PLACED, Counted, Source, not_here, put_in_place, roots, to_be_placed
from fedlens.data.published import (
    MINI,
    MINI_CONTENTS,
    PUBLISHED,
    Download,
    Form,
    Published,
    find,
    mini_content,
    remedy,
)
from fedlens.storage.download import Cut, Unreachable, receive
from fedlens.storage.locks import try_lock
from fedlens.storage.reading import BadFile, digest_of, reading

ATTEMPTS = 4  # consecutive attempts without progress


class NamedSet(NamedTuple):
    """A named set: its name, its folder if it is here, its contents."""

    name: str
    where: str | None
    contents: str


def get(
    name: str,
    dest: Path,
    *,
    base_url: str | None = None,
    progress: Counted | None = None,
    wait: float = 1.0,
) -> Path:
    """Download a set into `dest`, and return the folder of its files.

    Files that are present and correct are kept, and an incomplete download is resumed. `progress`
    is called with the bytes received so far, and all there are. `base_url`
    (or the variable FEDLENS_MIRROR) replaces the official addresses: the files are there, or there
    in a folder named like the set. After a lost connection it waits `wait` seconds, then twice as
    long.
    """
    entry = fetchable(name)
    form = entry.forms[0]
    folder = dest / form.folders[0]
    if all(md5_of(folder / file) == md5 for file, md5 in form.files.items()):
        return folder
    total = sum(file.size for file in entry.downloads)
    before = 0

    def report(done: int) -> None:
        if progress:
            progress(before + done, total)

    with _writing(dest):
        for file in entry.downloads:
            is_archive = file.name not in form.files
            place = (dest if is_archive else folder) / file.name
            if md5_of(place) != file.md5:
                try:
                    download(file, _bases(entry, base_url), place, report, wait)
                except Unreachable as error:
                    raise Unreachable(
                        f"{name} cannot be fetched from {error}: try again, or take files you "
                        f"have with `fedlens data get {name} --from PATH`"
                    ) from error
            report(file.size)
            before += file.size
            if is_archive:
                get_from(name, place, dest)
                place.unlink()
    return folder


def get_from(name: str, path: Path, dest: Path) -> Path:
    """Copy a set from a folder or from the published archive into `dest`, and verify it."""
    entry = fetchable(name)
    with _writing(dest):
        dest.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            return _copy(entry, path, dest, path)
        if not path.is_file():
            raise ValueError(f"there is no {path}: name the folder or archive that holds {name}")
        with tempfile.TemporaryDirectory(dir=dest) as unpacked:
            _extract(entry, path, Path(unpacked))
            return _copy(entry, Path(unpacked), dest, path)


def check(name: str, source: Source) -> list[tuple[str, str]]:
    """Each file of a set and its state: "ok", "damaged" or "missing".

    A file without a published checksum is "readable" at best.
    """
    if name == MINI:
        return [(f"{name}.npz", _state(mini_content, "ok"))]
    if name in PLACED:
        folder, form = put_in_place(name, source)
        state = _state(lambda: DATASETS[name](source), "readable")
        return [(str(file), state) for pattern in form for file in sorted(folder.glob(pattern))]
    if name in SETS:
        places = _prepared(name, source)
        if not places:
            raise not_here(name, source, remedy_for(name))
        return [(str(place), store.state(place)) for place in places]
    entry = fetchable(name)
    found = find(entry, roots(source))
    if found is None:
        raise not_here(name, source, remedy(name))
    damaged = _damaged(found.form, found.folder)
    states = {
        **{file: "ok" if md5 else "readable" for file, md5 in found.form.files.items()},
        **{file.name: "damaged" for file in damaged},
        **dict.fromkeys(found.missing, "missing"),
    }
    return [(str(found.folder / file), state) for file, state in states.items()]


def _state(load: Callable[[], object], good: str) -> str:
    try:
        load()
    except ValueError:
        return "damaged"
    return good


def named_sets(source: Source) -> list[NamedSet]:
    """The named sets, the folder of each, and what is in it."""
    rows = [NamedSet(MINI, "inside the package", MINI_CONTENTS)]
    for name, entry in PUBLISHED.items():
        found = find(entry, roots(source))
        here = str(found.folder) if found and not found.missing else None
        rows.append(NamedSet(name, here, entry.contents))
    for name, placed in PLACED.items():
        place, contents = None, placed.contents
        with suppress(ValueError):
            place = put_in_place(name, source)[0]
        if name == "tiny-imagenet" and place is not None:  # it may have only some of its classes
            with suppress(OSError):
                contents = tiny_imagenet_contents(place)
        rows.append(NamedSet(name, None if place is None else str(place), contents))
    for name in SETS:
        made = ", ".join(map(str, _prepared(name, source)))
        rows.append(NamedSet(name, made or None, "made by `fedlens data prepare`"))
    return rows


def here(source: Source) -> list[str]:
    """The named sets on this machine; a partial set counts if it has its own folder."""
    partly = set()
    for name, entry in PUBLISHED.items():
        found = find(entry, roots(source))
        if found and found.folder not in roots(source):  # files in a root may belong to another set
            partly.add(name)
    return [row.name for row in named_sets(source) if row.where or row.name in partly]


def remedy_for(name: str) -> str:
    """Instructions for a set whose files are damaged or missing."""
    if name == MINI:
        return "install Fedlens again"
    if name in PLACED:
        return to_be_placed(name)
    if name in SETS:
        return f"make it with `fedlens data prepare {name} --from METADATA --images IMAGES`"
    return f"fetch it again with `fedlens data get {name}`"


def _prepared(name: str, source: Source) -> list[Path]:
    """The folders where a set was prepared, in one or more sizes."""
    return [place for root in roots(source) for place in sorted(root.glob(f"{name}-*"))]


def fetchable(name: str) -> Published:
    """The entry called `name` in the catalogue; a ValueError if it cannot be fetched."""
    if name == MINI:
        raise ValueError(f"{name} is inside the package: there is nothing to fetch")
    if name in PLACED or name in SETS:
        raise ValueError(f"{name} cannot be fetched: {remedy_for(name)}")
    if name not in PUBLISHED:
        raise ValueError(f"{name!r} is not a published set: {did_you_mean(name, PUBLISHED)}")
    return PUBLISHED[name]


def _bases(entry: Published, base_url: str | None) -> tuple[str, ...]:
    mirror = base_url or os.environ.get("FEDLENS_MIRROR")
    if not mirror:
        return entry.addresses
    if not mirror.startswith(("http://", "https://")):
        raise ValueError(f"{mirror!r} is not an address: begin it with http:// or https://")
    mirror = mirror.rstrip("/")
    return f"{mirror}/{entry.name}", mirror


def _damaged(form: Form, folder: Path) -> set[Path]:
    """The files that exist but are damaged."""
    damaged = set()
    for file, md5 in form.files.items():
        if md5 is not None and md5_of(folder / file) not in (md5, None):
            damaged.add(folder / file)
    if None in form.files.values():
        try:
            form.read(folder)
        except BadFile as error:
            damaged.add(error.file)
    return damaged


def _copy(entry: Published, path: Path, dest: Path, said: Path) -> Path:
    """Copy the files found in `path`, which error messages call `said`."""
    found = find(entry, [path])
    if found is None:
        files = ", ".join(entry.forms[0].files)
        raise ValueError(f"{said} does not hold {entry.name}: it should hold {files}")
    for file in found.missing:
        raise ValueError(f"{said} lacks {file}: {entry.name} needs it, so add it")
    for damaged in sorted(_damaged(found.form, found.folder)):
        raise ValueError(
            f"{damaged.name} in {said} is damaged (not the published file): take another copy"
        )
    folder = dest / found.form.folders[0]
    folder.mkdir(parents=True, exist_ok=True)
    for file in found.form.files:
        place = folder / file
        if not (place.exists() and place.samefile(found.folder / file)):
            part = place.with_name(f"{file}.part")
            shutil.copyfile(found.folder / file, part)
            part.replace(place)
    return folder


def _extract(entry: Published, archive: Path, dest: Path) -> None:
    """Unpack only the files of the set."""
    wanted = {file for form in entry.forms for file in form.files}
    left = 8 * (entry.num_train + entry.num_test) * entry.side**2  # bytes left to unpack, at most
    with (
        reading(archive, f"name the folder or the .tar.gz archive that holds {entry.name}"),
        tarfile.open(archive) as tar,
    ):
        for member in tar:
            if member.isfile() and Path(member.name).name in wanted:
                left -= member.size
                if left < 0:
                    raise ValueError(f"with {member.name} it unpacks to more than the set has")
                tar.extract(member, dest, filter="data")


@contextmanager
def _writing(dest: Path) -> Iterator[None]:
    try:
        yield
    except Unreachable:
        raise
    except OSError as error:
        raise ValueError(
            f"{error.filename or dest} cannot be written or read ({error.strerror or error}): "
            "free some space or choose another folder"
        ) from error


def download(
    file: Download, bases: Sequence[str], place: Path, report: Callable[[int], None], wait: float
) -> None:
    """Download a file to `place`, from the first of the addresses that provides it.

    `report` is called with the bytes received so far. Raises Unreachable.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(place.name + ".part")
    reasons = []
    with _to_oneself(part):
        for base in bases:
            url = f"{base}/{file.name}"
            try:
                _fill(part, url, file.size, report, wait)
            except Unreachable as error:
                reasons.append(f"{url} ({error})")
                continue
            if md5_of(part) == file.md5:
                part.replace(place)
                return
            part.write_bytes(b"")
            reasons.append(f"{url} (wrong checksum, removed)")
        raise Unreachable(", ".join(reasons))


@contextmanager
def _to_oneself(part: Path) -> Iterator[None]:
    """Lock a file while it is downloaded: two processes at once would corrupt it."""
    with part.open("ab") as file:
        if try_lock(file.fileno()) is False:
            raise ValueError(f"{part} is being fetched by another process: wait until it is there")
        try:
            yield
        except BaseException:
            if not _size(part):
                part.unlink(missing_ok=True)
            raise


def md5_of(path: Path) -> str | None:
    """The md5 sum of a file, or None if there is no file."""
    return digest_of(path, "md5") if path.is_file() else None


def _fill(part: Path, url: str, size: int, report: Callable[[int], None], wait: float) -> None:
    """Receive until `part` has `size` bytes, or until the server has no more."""
    best, failures = _size(part), 0
    while _size(part) < size:
        try:
            _receive(part, url, size, report)
            return
        except Cut as error:
            failures = 1 if _size(part) > best else failures + 1
            best = max(best, _size(part))
            report(best)
            if failures == ATTEMPTS:
                raise Unreachable(str(error)) from error
            time.sleep(wait * 2 ** (failures - 1))


def _receive(part: Path, url: str, size: int, report: Callable[[int], None]) -> None:
    """Receive the rest of `part` over one connection; all of it if the server ignores ranges."""
    done, chunks = receive(url, _size(part), size)
    with part.open("ab" if done else "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            done += len(chunk)
            report(min(done, size))
            if done > size:  # a wrong file
                return


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
