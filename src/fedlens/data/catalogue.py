"""The published data sets: their files, download addresses, and class names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedlens.core.federation import Examples
from fedlens.data import cifar, idx


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


def _idx_forms(folders: tuple[str, ...], downloads: tuple[Download, ...]) -> tuple[Form, ...]:
    zipped: dict[str, str | None] = {file.name: file.md5 for file in downloads}
    plain: dict[str, str | None] = {file.name.removesuffix(".gz"): None for file in downloads}
    return (
        Form(folders, zipped, partial(idx.read_folder, ending=".gz")),
        Form(folders, plain, partial(idx.read_folder, ending="")),
    )


_FASHION_FILES = (
    Download("train-images-idx3-ubyte.gz", 26421880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    Download("train-labels-idx1-ubyte.gz", 29515, "25c81989df183df01b3e8a0aad5dffbe"),
    Download("t10k-images-idx3-ubyte.gz", 4422102, "bef4ecab320f06d8554ea6380940ec79"),
    Download("t10k-labels-idx1-ubyte.gz", 5148, "bb300cfdad3c16e7a12a480ee83cd310"),
)

FASHION_MNIST = Published(
    name="fashion-mnist",
    num_train=60_000,
    num_test=10_000,
    side=28,
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    mean=(0.2860,),
    std=(0.3530,),
    forms=_idx_forms(("fashion-mnist", "FashionMNIST/raw"), _FASHION_FILES),
    addresses=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    ),
    downloads=_FASHION_FILES,
    first_test_labels=(9, 2, 1, 1, 6, 1, 4, 6, 5, 7),
)

_MNIST_FILES = (
    Download("train-images-idx3-ubyte.gz", 9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    Download("train-labels-idx1-ubyte.gz", 28881, "d53e105ee54ea40749a09fcbcd1e9432"),
    Download("t10k-images-idx3-ubyte.gz", 1648877, "9fb629c4189551a2d022fa330f9573f3"),
    Download("t10k-labels-idx1-ubyte.gz", 4542, "ec29112dd5afa0611ce80d1b7f02629c"),
)

MNIST = Published(
    name="mnist",
    num_train=60_000,
    num_test=10_000,
    side=28,
    classes=tuple("0123456789"),
    mean=(0.1307,),
    std=(0.3081,),
    forms=_idx_forms(("mnist", "MNIST/raw"), _MNIST_FILES),
    addresses=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    downloads=_MNIST_FILES,
    first_test_labels=(7, 2, 1, 0, 4, 1, 4, 9, 5, 9),
)

_TORONTO = "https://www.cs.toronto.edu/~kriz"
_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))

CIFAR10 = Published(
    name="cifar10",
    num_train=50_000,
    num_test=10_000,
    side=32,
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    forms=(
        Form(
            folders=("cifar-10-batches-py",),
            files={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
                "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
            },
            read=partial(
                cifar.read_folder,
                train=_BATCHES,
                test=("test_batch",),
                labels=("labels",),
                binary=False,
            ),
        ),
        Form(
            folders=("cifar-10-batches-bin",),
            files={f"{name}.bin": None for name in (*_BATCHES, "test_batch")},
            read=partial(
                cifar.read_folder,
                train=tuple(f"{name}.bin" for name in _BATCHES),
                test=("test_batch.bin",),
                labels=("labels",),
                binary=True,
            ),
        ),
    ),
    addresses=(_TORONTO,),
    downloads=(Download("cifar-10-python.tar.gz", 170498071, "c58f30108f718f92721af3b95e74349a"),),
)

_FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""

_COARSE = """
aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
household_furniture insects large_carnivores large_man-made_outdoor_things
large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals
non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
"""

CIFAR100_COARSE = tuple(_COARSE.split())

CIFAR100 = Published(
    name="cifar100",
    num_train=50_000,
    num_test=10_000,
    side=32,
    classes=tuple(_FINE.split()),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    forms=(
        Form(
            folders=("cifar-100-python",),
            files={
                "train": "16019d7e3df5f24257cddd939b257f8d",
                "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
                "meta": "7973b15100ade9c7d40fb424638fde48",
            },
            read=partial(
                cifar.read_folder,
                train=("train",),
                test=("test",),
                labels=("coarse_labels", "fine_labels"),
                binary=False,
            ),
        ),
        Form(
            folders=("cifar-100-binary",),
            files={"train.bin": None, "test.bin": None},
            read=partial(
                cifar.read_folder,
                train=("train.bin",),
                test=("test.bin",),
                labels=("coarse_labels", "fine_labels"),
                binary=True,
            ),
        ),
    ),
    addresses=(_TORONTO,),
    downloads=(Download("cifar-100-python.tar.gz", 169001437, "eb9058c3a382ffc7106e4002c42a8d85"),),
)

PUBLISHED = {entry.name: entry for entry in (FASHION_MNIST, MNIST, CIFAR10, CIFAR100)}
