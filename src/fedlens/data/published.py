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


def idx_forms(folders: tuple[str, ...], downloads: tuple[Download, ...]) -> tuple[Form, ...]:
    """MNIST's four files, gzipped as they are downloaded, or unpacked."""
    zipped: dict[str, str | None] = {file.name: file.md5 for file in downloads}
    plain: dict[str, str | None] = {file.name.removesuffix(".gz"): None for file in downloads}
    return (
        Form(folders, zipped, partial(read_idx_folder, ending=".gz")),
        Form(folders, plain, partial(read_idx_folder, ending="")),
    )


SIZES_OF_MNIST = 60_000, 10_000, 28
IDX_FILES = "train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"


def _idx_downloads(*files: tuple[int, str]) -> tuple[Download, ...]:
    """MNIST's four files, from their sizes and md5 sums."""
    return tuple(
        Download(f"{name}-ubyte.gz", *file) for name, file in zip(IDX_FILES, files, strict=True)
    )


FASHION_MNIST_FILES = _idx_downloads(
    (26421880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    (29515, "25c81989df183df01b3e8a0aad5dffbe"),
    (4422102, "bef4ecab320f06d8554ea6380940ec79"),
    (5148, "bb300cfdad3c16e7a12a480ee83cd310"),
)
FASHION_MNIST = Published(
    "fashion-mnist",
    *SIZES_OF_MNIST,
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    mean=(0.2860,),
    std=(0.3530,),
    forms=idx_forms(("fashion-mnist", "FashionMNIST/raw"), FASHION_MNIST_FILES),
    addresses=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    ),
    downloads=FASHION_MNIST_FILES,
    first_test_labels=(9, 2, 1, 1, 6, 1, 4, 6, 5, 7),
)

MNIST_FILES = _idx_downloads(
    (9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    (28881, "d53e105ee54ea40749a09fcbcd1e9432"),
    (1648877, "9fb629c4189551a2d022fa330f9573f3"),
    (4542, "ec29112dd5afa0611ce80d1b7f02629c"),
)
MNIST = Published(
    "mnist",
    *SIZES_OF_MNIST,
    classes=tuple("0123456789"),
    mean=(0.1307,),
    std=(0.3081,),
    forms=idx_forms(("mnist", "MNIST/raw"), MNIST_FILES),
    addresses=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    downloads=MNIST_FILES,
    first_test_labels=(7, 2, 1, 0, 4, 1, 4, 9, 5, 9),
)


def _cifar(
    name: str,
    classes: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    folders: tuple[str, str],
    files: Mapping[str, str],
    train: tuple[str, ...],
    test: tuple[str, ...],
    labels: tuple[str, ...],
    archive: Download,
) -> Published:
    """A set in CIFAR's two forms: folders of Python's files, with md5 sums, and of binary files."""
    binary = [tuple(f"{file}.bin" for file in part) for part in (train, test)]
    read = partial(read_cifar_folder, labels=labels)
    forms = (
        Form(folders[:1], files, partial(read, train=train, test=test, binary=False)),
        Form(
            folders[1:],
            dict.fromkeys((*binary[0], *binary[1])),
            partial(read, train=binary[0], test=binary[1], binary=True),
        ),
    )
    addresses = ("https://www.cs.toronto.edu/~kriz",)
    return Published(
        name, 50_000, 10_000, 32, classes, mean, std, forms, addresses, downloads=(archive,)
    )


CIFAR10 = _cifar(
    "cifar10",
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
    files={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    labels=("labels",),
    archive=Download("cifar-10-python.tar.gz", 170498071, "c58f30108f718f92721af3b95e74349a"),
)

FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""

COARSE = """
aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
household_furniture insects large_carnivores large_man-made_outdoor_things
large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals
non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
"""

CIFAR100_COARSE = tuple(COARSE.split())

CIFAR100 = _cifar(
    "cifar100",
    classes=tuple(FINE.split()),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    folders=("cifar-100-python", "cifar-100-binary"),
    files={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
    train=("train",),
    test=("test",),
    labels=("coarse_labels", "fine_labels"),
    archive=Download("cifar-100-python.tar.gz", 169001437, "eb9058c3a382ffc7106e4002c42a8d85"),
)

# Inside the package, so that runs need no files: a balanced tenth of Fashion-MNIST. Its MIT licence
# is in the same folder; tools/make_mini.py makes it.
MINI = "fashion-mnist-mini"
MINI_SHA256 = "dbf491042f9bdebd4b2674d2c9e977868b0b456acafd75c06296b5b55988b513"
MINI_CONTENTS = "6,000 + 1,000 images, 28×28, 10 classes"

PUBLISHED = {entry.name: entry for entry in (FASHION_MNIST, MNIST, CIFAR10, CIFAR100)}


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


def load(entry: Published, source: Source) -> Dataset:
    """Load a published set from its files on this machine."""
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
    entry = FASHION_MNIST
    return Dataset(MINI, train, test, entry.classes, entry.mean, entry.std)


def mini_content() -> bytes:
    """The bytes of the file, after a check of their hash."""
    file = importlib.resources.files("fedlens.data") / "files" / f"{MINI}.npz"
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != MINI_SHA256:
        raise ValueError(f"{file} is damaged: install fedlens again")
    return content


def fashion_mnist(source: Source, *, size: Count | None = None) -> Dataset:
    """Fashion-MNIST: 70,000 gray images of clothes, 28×28 or resized, 10 classes."""
    return resized(load(FASHION_MNIST, source), size)


def mnist(source: Source, *, size: Count | None = None) -> Dataset:
    """MNIST: 70,000 gray images of handwritten digits, 28×28 or resized, 10 classes."""
    return resized(load(MNIST, source), size)


def cifar10(source: Source, *, size: Count | None = None) -> Dataset:
    """CIFAR-10: 60,000 colour images, 32×32 or resized, 10 classes."""
    return resized(load(CIFAR10, source), size)


def cifar100(
    source: Source, *, labels: Literal["fine", "coarse"] = "fine", size: Count | None = None
) -> Dataset:
    """CIFAR-100: 60,000 colour images, 32×32 or resized, 100 fine or 20 coarse classes."""
    dataset = resized(load(CIFAR100, source), size)
    if labels == "fine":
        return dataset

    def coarse(part: Examples) -> Examples:
        return replace(part, labels=torch.from_numpy(part.columns["coarse"].astype("int64")))

    train, test = coarse(dataset.train), coarse(dataset.test)
    return replace(dataset, train=train, test=test, classes=CIFAR100_COARSE)
