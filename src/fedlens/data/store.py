"""Large sets, decoded and resized once into one file of pixels that is memory-mapped.

A store is a folder: `listing.npz` lists the images, `images.u8` holds the pixels, and
`manifest.json`, written last, describes the result. While the store is made, `images.part` holds
the pixels and `done.part` the state of each image, with a checksum of its pixels: interrupted work
resumes where it stopped, and pixels that were lost or changed since then are decoded again.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlens.config.sections import Count
from fedlens.core.federation import Dataset
from fedlens.data import numpy_files
from fedlens.data.arrays import Column, examples, mean_and_std
from fedlens.data.curation import Listing
from fedlens.data.pictures import ENDINGS, Form, read
from fedlens.data.places import Source, not_here, roots
from fedlens.storage import free_memory
from fedlens.storage.files import remove_leftovers, replacing, write_atomically
from fedlens.storage.free_memory import num_cores
from fedlens.storage.locks import one_writer
from fedlens.storage.reading import Fields, demand_fields, digest_of, reading

CHUNK = 256  # images after which progress is saved
BLOCK = 2**24  # bytes
DONE, MISSING, BROKEN = 1, 2, 3  # states of an image; 0: not processed yet
FIELDS: Fields = {
    **{"name": str, "size": int, "num_train": int, "num_test": int, "num_left_out": int},
    **{"left_out": list, "sha256": str, "mean": list, "std": list},
}  # the fields of the manifest, with their types
WHY = {MISSING: "missing", BROKEN: "cannot be decoded"}
MARK = np.dtype([("state", "u1"), ("checksum", "<u4")])  # the entry of an image in `done.part`

Progress = Callable[[int, int, str], None]
"""A progress callback: the number of images done, the total, and the current step."""


def prepare(
    name: str,
    listed: Listing,
    images: Path,
    store: Path,
    size: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Decode the images of a set into a store, and return its manifest.

    Images are anywhere below `images`, named ID.jpg or similar. Images that are missing or cannot
    be decoded are left out, and the manifest lists them. A complete store is kept.
    """
    if size < 1:
        raise ValueError(f"size is {size}: choose a number of pixels, such as 96")
    if not images.is_dir():
        raise ValueError(f"{images} is not a folder: name the one that holds the images")
    with one_writer(store):
        remove_leftovers(store)
        _keep_listing(store, listed, size)
        whole = manifest(store)
        if whole is not None and _holds(store, whole):
            _tidy(store)
            return whole
        (store / "manifest.json").unlink(missing_ok=True)
        done = _decode_all(listed, _found(images, listed.ids), store, size, progress)
        return _finish(name, listed, store, size, done, progress)


def manifest(store: Path) -> dict[str, Any] | None:
    """The manifest of a store, or None if the store is not complete."""
    file = store / "manifest.json"
    if not file.is_file():
        return None
    remedy = "remove it and prepare again"
    with reading(file, remedy):
        about = demand_fields(json.loads(file.read_bytes()), FIELDS, file, remedy)
        for out in about["left_out"]:
            demand_fields(out, {"id": str}, file, remedy)
        if not 1 <= about["size"] < 1 << 16:
            raise ValueError(f"its 'size' is {about['size']}")
        if any(len(about[name]) != 3 for name in ("mean", "std")):
            raise ValueError("its 'mean' and 'std' are not of three channels")
    return about


def state(store: Path) -> str:
    """The state of a store's images: "ok", "damaged" or "missing"."""
    try:
        about = manifest(store)
    except ValueError:
        return "damaged"
    if about is None:
        return "missing"
    return "ok" if _holds(store, about) else "damaged"


def dataset(store: Path) -> Dataset:
    """The data set of a store; its pixels stay on disk until they are read."""
    about = manifest(store)
    if about is None:
        raise ValueError(f"{store} is incomplete: go on with `fedlens data prepare`")
    with reading(store, f"remove {store} and prepare again"):
        arrays = numpy_files.load(store / "listing.npz")
        kept = np.flatnonzero(~np.isin(arrays["ids"], [out["id"] for out in about["left_out"]]))
        shape = (len(kept), about["size"], about["size"], 3)
        if (store / "images.u8").stat().st_size != np.prod(shape):
            raise ValueError("images.u8 is cut short")
        # Copy-on-write: torch requires writable memory, and writes must not reach the file.
        pixels = np.memmap(store / "images.u8", np.uint8, "c", shape=shape)
        prefix = "column_"
        known = {k.removeprefix(prefix): c for k, c in arrays.items() if k.startswith(prefix)}
        columns = {name: c[kept] for name, c in known.items()} | {"image_id": arrays["ids"][kept]}
        num_train = int((kept < int(arrays["num_train"])).sum())
        train, test = (
            examples(pixels, arrays["labels"][kept], columns, part)
            for part in (slice(num_train), slice(num_train, None))
        )
        classes = tuple(map(str, arrays["classes"]))
        mean, std = tuple(about["mean"]), tuple(about["std"])
        return Dataset(about["name"], train, test, classes, mean, std, is_mapped=True)


def _prepared(name: str, source: Source, size: int) -> Dataset:
    """The set as `fedlens data prepare` made it."""
    for root in roots(source):
        place = root / f"{name}-{size}"
        if place.is_dir():
            return dataset(place)
    raise not_here(
        f"{name} of size {size}",
        source,
        f"make it with `fedlens data prepare {name} --size {size} --from METADATA --images IMAGES`",
    )


def inaturalist_user_120k(source: Source, *, size: Count = 96) -> Dataset:
    """iNaturalist: 120,300 photographs of 1,203 species, `size` × `size`, by user."""
    return _prepared("inaturalist-user-120k", source, size)


def inaturalist_geo_30k(source: Source, *, size: Count = 96) -> Dataset:
    """iNaturalist: 120,300 photographs, `size` × `size`, by S2 cell of at most 30,000."""
    return _prepared("inaturalist-geo-30k", source, size)


def inaturalist_geo_3k(source: Source, *, size: Count = 96) -> Dataset:
    """iNaturalist: 120,300 photographs, `size` × `size`, by S2 cell of at most 3,000."""
    return _prepared("inaturalist-geo-3k", source, size)


def inaturalist_geo_1k(source: Source, *, size: Count = 96) -> Dataset:
    """iNaturalist: 120,300 photographs, `size` × `size`, by S2 cell of at most 1,000."""
    return _prepared("inaturalist-geo-1k", source, size)


def inaturalist_geo_100(source: Source, *, size: Count = 96) -> Dataset:
    """iNaturalist: 120,300 photographs, `size` × `size`, by S2 cell of at most 100."""
    return _prepared("inaturalist-geo-100", source, size)


def landmarks_user_160k(source: Source, *, size: Count = 96) -> Dataset:
    """Landmarks: 164,172 photographs of 2,028 landmarks, `size` × `size`, by author."""
    return _prepared("landmarks-user-160k", source, size)


def _keep_listing(store: Path, listed: Listing, size: int) -> None:
    """Write the listing of the store; if there is one already, it must be the same."""
    arrays: dict[str, Column] = {
        **{"ids": np.array(listed.ids), "labels": listed.labels},
        **{"num_train": np.array(listed.num_train), "classes": np.array(listed.classes)},
        **{"size": np.array(size)},
        **{f"column_{name}": column for name, column in listed.columns.items()},
    }
    file = store / "listing.npz"
    if file.is_file():
        if not _equal(numpy_files.load(file), arrays):
            raise ValueError(f"{store} was started with other metadata: remove it, or restore them")
        return
    with replacing(file) as opened:
        np.savez(opened, **arrays)  # type: ignore[arg-type]  # NumPy's stub takes it for an option


def _equal(a: Mapping[str, Column], b: Mapping[str, Column]) -> bool:
    def same(x: Column, y: Column) -> bool:
        return np.array_equal(x, y, equal_nan=x.dtype.kind == y.dtype.kind == "f")

    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def _found(images: Path, ids: Any) -> dict[str, Path]:
    """The path of the image of each id, for the images that exist."""
    wanted = set(ids)
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(images):
        for file in files:
            stem, _, ending = file.rpartition(".")
            if stem in wanted and f".{ending.lower()}" in ENDINGS:
                found[stem] = Path(folder) / file
    return found


def _decode_all(
    listed: Listing, found: Mapping[str, Path], store: Path, size: int, progress: Progress | None
) -> Column:
    """Fill `images.part`, and return the state of each image."""
    num = len(listed.ids)
    pixels = _mapped(store / "images.part", np.dtype(np.uint8), (num, size, size, 3))
    marks = _mapped(store / "done.part", MARK, (num,))

    def fill(i: int) -> tuple[int, int]:
        path = found.get(listed.ids[i])
        try:
            if path is None:
                return MISSING, 0
            pixels[i] = read(path, Form(size, 3))
        except ValueError:
            return BROKEN, 0
        return DONE, zlib.crc32(pixels[i])

    def is_done(i: int) -> bool:
        return bool(marks["checksum"][i] == zlib.crc32(pixels[i]))

    done = [i for i in np.flatnonzero(marks["state"] == DONE).tolist() if is_done(i)]
    todo = np.setdiff1d(np.arange(num), done)
    before = num - len(todo)
    if progress:
        progress(before, num, "decoding")
    with ThreadPoolExecutor(num_cores()) as pool:
        for start in range(0, len(todo), CHUNK):
            part = todo[start : start + CHUNK]
            filled = list(pool.map(fill, part.tolist()))
            pixels.flush()  # before the marks: after a crash, no mark may exist without its pixels
            marks[part] = np.array(filled, MARK)
            marks.flush()
            if progress:
                progress(before + start + len(part), num, "decoding")
    return np.array(marks["state"])


def _mapped(file: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Memory-map a file; a file that is missing or of another size is replaced by zeros.

    They are written: a memory map with holes, on a full disk, kills the process.
    """
    size = int(np.prod(shape)) * dtype.itemsize
    if not file.is_file() or file.stat().st_size != size:
        try:
            with file.open("wb") as new:
                for start in range(0, size, BLOCK):
                    new.write(bytes(min(BLOCK, size - start)))
        except OSError as error:
            file.unlink()
            need = f"{file} needs {free_memory.in_words(size)} ({error.strerror})"
            raise OSError(f"{need}: free some space, or choose another --data") from error
    return np.memmap(file, dtype, "r+", shape=shape)


def _finish(
    name: str, listed: Listing, store: Path, size: int, done: Column, progress: Progress | None
) -> dict[str, Any]:
    """Write the decoded pixels without gaps, train before test, then the manifest."""
    kept = np.flatnonzero(done == DONE)
    num_train = int((kept < listed.num_train).sum())
    if not num_train or num_train == len(kept):
        raise ValueError(
            f"{num_train} training and {len(kept) - num_train} test images of {name} were found: "
            "name the folder that holds the images"
        )
    pixels = np.memmap(store / "images.part", np.uint8, "r", shape=(len(done), size, size, 3))
    digest = hashlib.sha256()
    with replacing(store / "images.u8") as file:
        for start in range(0, len(kept), CHUNK):
            chunk = pixels[kept[start : start + CHUNK]]
            digest.update(chunk.tobytes())
            file.write(chunk.tobytes())
            if progress:
                progress(start + len(chunk), len(kept), "writing")
    train = np.memmap(store / "images.u8", np.uint8, "c", shape=(num_train, size, size, 3))
    mean, std = mean_and_std(torch.from_numpy(train).permute(0, 3, 1, 2))
    left_out = np.flatnonzero(done != DONE).tolist()
    about = {
        **{"name": name, "size": size, "num_train": num_train},
        **{"num_test": len(kept) - num_train, "num_left_out": len(left_out)},
        "left_out": [{"id": listed.ids[i], "why": WHY[int(done[i])]} for i in left_out],
        "sha256": digest.hexdigest(),
        "mean": list(mean),
        "std": list(std),
    }
    write_atomically(store / "manifest.json", json.dumps(about, indent=1).encode())
    _tidy(store)
    return about


def _tidy(store: Path) -> None:
    for name in ("images.part", "done.part"):
        (store / name).unlink(missing_ok=True)


def _holds(store: Path, about: Mapping[str, Any]) -> bool:
    """Whether the pixels are those that a manifest describes."""
    file = store / "images.u8"
    return file.is_file() and digest_of(file) == about["sha256"]
