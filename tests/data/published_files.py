"""Small files in the forms in which data sets are published."""

import gzip
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

BATCHES = [f"data_batch_{i}" for i in range(1, 6)]


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.tobytes()


def write_idx_set(folder: Path, *, zipped: bool, train: int = 20, test: int = 10) -> None:
    """Image i of a part is pixels(...)[i], and its label is i % 10."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        arrays = {"images-idx3": pixels(count, 28, 28, seed=count), "labels-idx1": labels(count)}
        for kind, array in arrays.items():
            content = idx_bytes(array)
            name = f"{part}-{kind}-ubyte"
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
            else:
                (folder / name).write_bytes(content)


def labels(count: int, num_classes: int = 10) -> np.ndarray:
    return (np.arange(count) % num_classes).astype(np.uint8)


class Python2Pickler(pickle._Pickler):
    """Pickles as Python 2 did, in which the CIFAR files were written: bytes are its strings."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)
    write: Callable[[bytes], object]  # these two are there, but no stub names them
    memoize: Callable[[object], None]

    def save_bytes(self, content: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(content)) + content)
        self.memoize(content)

    dispatch[bytes] = save_bytes


def python2_pickle(content: object) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def cifar_batch(count: int, *names: str) -> bytes:
    """A pickled batch whose planes are pixels(count, 3072), labels counting up."""
    content = {b"batch_label": b"a batch", b"data": pixels(count, 3072, seed=count)}
    content |= {name.encode(): labels(count).tolist() for name in names}
    return python2_pickle(content)


def cifar_binary(count: int, num_labels: int) -> bytes:
    columns = [labels(count)[:, None]] * num_labels
    return np.concatenate([*columns, pixels(count, 3072, seed=count)], 1).tobytes()


def write_cifar10(folder: Path, *, binary: bool) -> None:
    """Five batches of 4 and a test batch of 10."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*BATCHES, "test_batch"]:
        count = 10 if name == "test_batch" else 4
        if binary:
            (folder / f"{name}.bin").write_bytes(cifar_binary(count, 1))
        else:
            (folder / name).write_bytes(cifar_batch(count, "labels"))
    if not binary:
        (folder / "batches.meta").write_bytes(python2_pickle({b"label_names": [b"airplane"]}))


def write_cifar100(folder: Path, *, binary: bool) -> None:
    """20 images to train on and 10 to test on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 20), ("test", 10)):
        if binary:
            (folder / f"{name}.bin").write_bytes(cifar_binary(count, 2))
        else:
            content = cifar_batch(count, "coarse_labels", "fine_labels")
            (folder / name).write_bytes(content)
    if not binary:
        (folder / "meta").write_bytes(python2_pickle({b"fine_label_names": [b"apple"]}))
