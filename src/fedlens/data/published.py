"""The published data sets: their files, how these are found and read, and their class names."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.resources
import io
import math
import pickle
import struct
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedlens.config.sections import Count
from fedlens.core.federation import Dataset, Examples
from fedlens.data import numpy_files
from fedlens.data.arrays import Column, Pixels, examples
from fedlens.data.places import Source, not_here, roots
from fedlens.storage import free_memory
from fedlens.storage.reading import MOST_UNPACKED, BadFile, reading


@dataclass(frozen=True)
class Form:
    """One form in which the files of a set are stored in a folder."""

    folders: tuple[str, ...]  # under a root; downloads go into the first
    files: Mapping[str, str | None]  # the md5 sum of each, if it is published
    read: Callable[[Path], tuple[Examples, Examples]]  # train and test


class Download(NamedTuple):
    """A file to download: a file of the set, or an archive."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class Published:
    """A published data set."""

    name: str
    num_train: int
    num_test: int
    side: int  # images are square
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    forms: tuple[Form, ...]  # the first is the form that is downloaded
    addresses: tuple[str, ...]  # each has all downloads
    downloads: tuple[Download, ...]
    first_test_labels: tuple[int, ...] = ()  # to distinguish sets with the same file names
    coarse_classes: tuple[str, ...] = ()

    @property
    def contents(self) -> str:
        """The contents of the set, in words."""
        return (
            f"{self.num_train:,} + {self.num_test:,} images, {self.side}×{self.side}, "
            f"{len(self.classes)} classes"
        )


UNSIGNED_BYTE = 0x08


def read_idx(path: Path, ndim: int) -> NDArray[np.uint8]:
    """The array of bytes in an idx file, which must have `ndim` dimensions."""
    is_zipped = path.suffix == ".gz"
    opened = gzip.GzipFile if is_zipped else Path.open
    with reading(path), opened(path, "rb") as file:
        head = file.read(4 + 4 * ndim)
        if len(head) < 4 + 4 * ndim or head[:4] != bytes([0, 0, UNSIGNED_BYTE, ndim]):
            raise BadFile(path, f"not an idx file of bytes in {ndim} dimensions")
        shape = struct.unpack(f">{ndim}I", head[4:])
        size = math.prod(shape)
        most = path.stat().st_size * (MOST_UNPACKED if is_zipped else 1)
        if not size or size > most:
            why = "no examples" if not size else f"{most:,} bytes at the most, shorter than the"
            raise BadFile(path, why if not size else f"{why} {size:,} it announces")
        free_memory.demand(f"{path}", {"images": size}, "take a machine with more, or fewer images")
        content = file.read(size + 1)
    if len(content) != size:
        said = "longer" if len(content) > size else f"{len(content):,} bytes, shorter"
        raise BadFile(path, f"{said} than the {size:,} it announces")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_idx_folder(folder: Path, *, ending: str) -> tuple[Examples, Examples]:
    """The training and test examples of MNIST's four files."""

    def part(name: str) -> Examples:
        images = folder / f"{name}-images-idx3-ubyte{ending}"
        labels = folder / f"{name}-labels-idx1-ubyte{ending}"
        pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
        if len(pixels) != len(numbers):
            raise BadFile(labels, f"{len(numbers)} labels for {len(pixels)} images")
        return examples(pixels, numbers)

    return part("train"), part("t10k")


PIXELS = 3 * 32 * 32
AT_ONCE = 256  # images that are resized together


class _Array:
    """Replaces a NumPy array in a pickle: it takes bytes and a shape, and executes no code."""

    def __init__(self, *_: object) -> None:
        self.content: NDArray[np.uint8] = np.empty((0, PIXELS), np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _Dtype) or fortran or not isinstance(content, bytes):
            raise ValueError("not a plain array of bytes")
        self.content = np.frombuffer(content, np.uint8).reshape(shape)


class _Dtype:
    """Replaces a NumPy dtype in a pickle, which must be uint8."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in (b"u1", "u1"):
            raise ValueError("an array of something else than bytes")

    def __setstate__(self, state: object) -> None:
        pass


class _Unpickler(pickle._Unpickler):
    """Reads dicts, lists, numbers, text and arrays of bytes, and refuses everything else.

    It extends the unpickler written in Python: the one in C allocates as much memory as a file
    claims to need.
    """

    allowed: Mapping[tuple[str, str], type] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
    }

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in self.allowed:
            raise ValueError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return self.allowed[module, name]


def read_pickle(path: Path, names: Sequence[str]) -> tuple[Pixels, list[Column]]:
    """The pixels [N, 32, 32, 3] of one pickled batch, and its lists of labels by name."""
    with reading(path):
        batch = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if not isinstance(batch, dict) or not isinstance(batch.get(b"data"), _Array):
            raise BadFile(path, "it holds no array called data")
        planes = batch[b"data"].content.reshape(-1, 3, 32, 32)
        labels = [_numbers(batch.get(name.encode()), name) for name in names]
    return planes.transpose(0, 2, 3, 1), _checked(path, len(planes), labels)


def _numbers(given: object, name: str) -> Column:
    if not isinstance(given, list) or not all(type(number) is int for number in given):
        raise ValueError(f"its {name} are not a list of numbers")
    return np.array(given, np.int64)


def read_binary(path: Path, num_labels: int) -> tuple[Pixels, list[Column]]:
    """The pixels and labels of one binary batch: records of `num_labels` label bytes and pixels."""
    with reading(path):
        content = np.frombuffer(path.read_bytes(), np.uint8)
    record = num_labels + PIXELS
    if len(content) % record:
        raise BadFile(path, f"{len(content)} bytes is not a multiple of {record}")
    records = content.reshape(-1, record)
    planes = records[:, num_labels:].reshape(-1, 3, 32, 32)
    labels = [records[:, i] for i in range(num_labels)]
    return planes.transpose(0, 2, 3, 1), _checked(path, len(planes), labels)


def _checked(path: Path, num_images: int, labels: list[Column]) -> list[Column]:
    if not num_images:
        raise BadFile(path, "no examples")
    for column in labels:
        if column.shape != (num_images,):
            raise BadFile(path, f"{len(column)} labels for {num_images} images")
    return labels


def read_cifar_folder(
    folder: Path, *, train: Sequence[str], test: Sequence[str], labels: Sequence[str], binary: bool
) -> tuple[Examples, Examples]:
    """The training and test examples, each read from one or more files.

    The last list of labels gives the classes. If there are two, "coarse_labels" and "fine_labels",
    both are kept, as the columns "coarse" and "fine".
    """

    def part(files: Sequence[str]) -> Examples:
        paths = [folder / name for name in files]
        batches = [
            read_binary(path, len(labels)) if binary else read_pickle(path, labels)
            for path in paths
        ]
        pixels = np.concatenate([pixels for pixels, _ in batches])
        lists = zip(*(lists for _, lists in batches), strict=True)
        columns = dict(zip(labels, map(np.concatenate, lists), strict=True))
        kept = {name.removesuffix("_labels"): column for name, column in columns.items()}
        return examples(pixels, columns[labels[-1]], kept if len(labels) > 1 else {})

    return part(train), part(test)


def idx_forms(folders: Sequence[str], downloads: Sequence[Download]) -> tuple[Form, ...]:
    """MNIST's four files, gzipped as they are downloaded, or unpacked."""
    zipped: dict[str, str | None] = {file.name: file.md5 for file in downloads}
    plain: dict[str, str | None] = {file.name.removesuffix(".gz"): None for file in downloads}
    return (
        Form(tuple(folders), zipped, partial(read_idx_folder, ending=".gz")),
        Form(tuple(folders), plain, partial(read_idx_folder, ending="")),
    )


def cifar_forms(
    folders: Sequence[str],
    files: Mapping[str, str],
    train: Sequence[str],
    test: Sequence[str],
    labels: Sequence[str],
) -> tuple[Form, ...]:
    """CIFAR's folders: of Python's files, with md5 sums, and of binary files."""
    binary = [[f"{file}.bin" for file in part] for part in (train, test)]
    read = partial(read_cifar_folder, labels=labels)
    named = dict.fromkeys((*binary[0], *binary[1]))
    return (
        Form(tuple(folders[:1]), files, partial(read, train=train, test=test, binary=False)),
        Form(
            tuple(folders[1:]), named, partial(read, train=binary[0], test=binary[1], binary=True)
        ),
    )


FILES = importlib.resources.files("fedlens.data") / "files"


def _catalogue() -> dict[str, Published]:
    """The sets that published.toml describes."""
    found = {}
    for name, told in tomllib.loads((FILES / "published.toml").read_text("utf-8")).items():
        downloads = tuple(Download(**one) for one in told.pop("downloads"))
        own = {key: told.pop(key) for key in ("files", "train", "test", "labels") if key in told}
        folders = told.pop("folders")
        forms = cifar_forms(folders, **own) if own else idx_forms(folders, downloads)
        about: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in told.items()
        }
        found[name] = Published(name, forms=forms, downloads=downloads, **about)
    return found


PUBLISHED = _catalogue()

# Inside the package, so that runs need no files: a balanced tenth of Fashion-MNIST. Its MIT licence
# is in the same folder; tools/make_mini.py makes it.
MINI = "fashion-mnist-mini"
MINI_SHA256 = "dbf491042f9bdebd4b2674d2c9e977868b0b456acafd75c06296b5b55988b513"
MINI_CONTENTS = "6,000 + 1,000 images, 28×28, 10 classes"


def resized(dataset: Dataset, size: int | None) -> Dataset:
    """The set with images of `size` × `size`, interpolated linearly as Pillow does it."""
    if size is None:
        return dataset
    count, channels = len(dataset.train) + len(dataset.test), dataset.shape[0]
    needed = {f"images of {size}×{size}": count * channels * size**2}
    free_memory.demand(dataset.name, needed, "choose a smaller size")

    def of(part: Examples) -> Examples:
        images = torch.empty((len(part), size, size, channels), dtype=torch.uint8)
        images = images.permute(0, 3, 1, 2)  # stored channels-last
        for some in torch.split(torch.arange(len(part)), AT_ONCE):
            pixels = F.interpolate(
                part.images[some].float(), (size, size), mode="bilinear", antialias=True
            )
            images[some] = pixels.round().clamp(0, 255).to(torch.uint8)
        return replace(part, images=images)

    return replace(dataset, train=of(dataset.train), test=of(dataset.test))


class Located(NamedTuple):
    """A folder that holds all or some of the files of a set."""

    folder: Path
    form: Form
    missing: tuple[str, ...]


def find(entry: Published, places: Sequence[Path]) -> Located | None:
    """The first folder that holds a whole set, else the first that holds some of its files."""
    partly = None
    for root in places:
        for form in entry.forms:
            for folder in (*(root / name for name in form.folders), root):
                missing = tuple(name for name in form.files if not (folder / name).is_file())
                if len(missing) == len(form.files) or _is_another(entry, form, folder):
                    continue
                found = Located(folder, form, missing)
                if not missing:
                    return found
                partly = partly or found
    return partly


def _is_another(entry: Published, form: Form, folder: Path) -> bool:
    """Whether the files are another set's: MNIST and Fashion-MNIST use the same file names."""
    others = {e.first_test_labels for e in PUBLISHED.values() if e.name != entry.name} - {()}
    names = [name for name in form.files if name.startswith("t10k-labels")]
    try:
        return any(tuple(read_idx(folder / name, 1)[:10].tolist()) in others for name in names)
    except ValueError:
        return False  # an unreadable file is reported when it is loaded


def remedy(name: str) -> str:
    return (
        f"fetch it with `fedlens data get {name}`, take files you have with "
        f"`fedlens data get {name} --from PATH`, or set FEDLENS_DATA to their folder"
    )


def load(name: str, source: Source) -> Dataset:
    """Load a published set from its files on this machine."""
    entry = PUBLISHED[name]
    found = find(entry, roots(source))
    if found is None:
        raise not_here(entry.name, source, remedy(entry.name))
    folder, form, missing = found
    if missing:
        lost = folder / missing[0]
        raise ValueError(f"{entry.name} is incomplete, {lost} is missing: {remedy(entry.name)}")
    try:
        train, test = form.read(folder)
    except BadFile as error:
        raise ValueError(
            f"{error.file} is damaged ({error.why}): remove it, then fetch it again with "
            f"`fedlens data get {entry.name}`"
        ) from error
    with reading(folder, f"fetch it again with `fedlens data get {entry.name}`"):
        return Dataset(entry.name, train, test, entry.classes, entry.mean, entry.std)


def fashion_mnist_mini(_source: Source, *, size: Count | None = None) -> Dataset:
    """600 training and 100 test images of each class of Fashion-MNIST, inside the package.

    They are resized to `size` × `size`, if it is given.
    """
    return resized(_mini(), size)


@functools.cache
def _mini() -> Dataset:
    """The data set, cached in the process: unpacking it takes as long as a small run."""
    arrays = numpy_files.read(io.BytesIO(mini_content()), MINI)
    train, test = (numpy_files.part(arrays, part, MINI) for part in ("train", "test"))
    entry = PUBLISHED["fashion-mnist"]
    return Dataset(MINI, train, test, entry.classes, entry.mean, entry.std)


def mini_content() -> bytes:
    """The bytes of the file, after a check of their hash."""
    file = FILES / f"{MINI}.npz"
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != MINI_SHA256:
        raise ValueError(f"{file} is damaged: install fedlens again")
    return content


def fashion_mnist(source: Source, *, size: Count | None = None) -> Dataset:
    """Fashion-MNIST: 70,000 gray images of clothes, 28×28 or resized, 10 classes."""
    return resized(load("fashion-mnist", source), size)


def mnist(source: Source, *, size: Count | None = None) -> Dataset:
    """MNIST: 70,000 gray images of handwritten digits, 28×28 or resized, 10 classes."""
    return resized(load("mnist", source), size)


def cifar10(source: Source, *, size: Count | None = None) -> Dataset:
    """CIFAR-10: 60,000 colour images, 32×32 or resized, 10 classes."""
    return resized(load("cifar10", source), size)


def cifar100(
    source: Source, *, labels: Literal["fine", "coarse"] = "fine", size: Count | None = None
) -> Dataset:
    """CIFAR-100: 60,000 colour images, 32×32 or resized, 100 fine or 20 coarse classes."""
    dataset = resized(load("cifar100", source), size)
    if labels == "fine":
        return dataset

    def coarse(part: Examples) -> Examples:
        return replace(part, labels=torch.from_numpy(part.columns["coarse"].astype("int64")))

    train, test = coarse(dataset.train), coarse(dataset.test)
    return replace(dataset, train=train, test=test, classes=PUBLISHED["cifar100"].coarse_classes)
