"""Files with the data of published sets."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fedlens.data import DATASETS, Source, fetch, published
from tests.fuzzing.cases import (
    NUMBERS,
    Data,
    Read,
    Reader,
    other_json,
    other_npz,
    spoilt,
)

SMALL_BOMB = gzip.compress(bytes(30_000_000), 1)


def read_idx(place: Path, data: Data) -> tuple[Path, Read]:
    zipped, ndim = data.draw(st.booleans()), data.draw(st.sampled_from([1, 3]))
    shape = [data.draw(st.sampled_from([2, 3, *NUMBERS])) % 2**32 for _ in range(ndim)]
    content = bytes([0, 0, 8, ndim]) + b"".join(n.to_bytes(4, "big") for n in shape)
    content += bytes(data.draw(st.integers(0, 40)))
    if data.draw(st.booleans()):
        content = spoilt(data, content)
    file = place / ("a.gz" if zipped else "a")
    packed = gzip.compress(content) if zipped else content
    if zipped and data.draw(st.integers(0, 20)) == 0:
        packed += SMALL_BOMB
    file.write_bytes(spoilt(data, packed) if zipped and data.draw(st.booleans()) else packed)
    return file, lambda: published.read_idx(file, ndim)


ARRAYS = {
    **{f"x_{part}": np.zeros((4, 5, 5), np.uint8) for part in ("train", "test")},
    **{f"y_{part}": np.arange(4) for part in ("train", "test")},
    **{f"writer_{part}": np.arange(4) for part in ("train", "test")},
    "classes": np.array(["a", "b", "c", "d"]),
    "plain": np.zeros(1),
}


def read_npz(place: Path, data: Data) -> tuple[Path, Read]:
    file = place / "a.npz"
    file.write_bytes(other_npz(data, ARRAYS))
    return file, lambda: DATASETS["npz"](Source(), path=str(file))


def read_handwriting(place: Path, data: Data) -> tuple[Path, Read]:
    name = data.draw(st.sampled_from(["femnist", "omniglot", "leaf"]))
    if name == "leaf":
        held = {"x": [[0.0] * 784] * 2, "y": [0, 1]}
        content = {"users": ["w"], "user_data": {"w": held}, "num_samples": [2]}
        for part in ("train", "test"):
            (place / "femnist" / part).mkdir(parents=True, exist_ok=True)
            file = place / "femnist" / part / "a.json"
            file.write_bytes(other_json(data, content) if part == "train" else b'{"user_data": {}}')
        return place, lambda: DATASETS["femnist"](Source(place))
    small = {
        **{f"x_{part}": np.zeros((4, 28, 28), np.uint8) for part in ("train", "test")},
        **{f"y_{part}": np.arange(4) for part in ("train", "test")},
        **{f"writer_{part}": np.arange(4) for part in ("train", "test")},
        "writers": np.array(["a", "b", "c", "d"]),
    }
    drawn = {"x_bits": np.zeros((4, 98), np.uint8), "y": np.array([0, 0, 1, 1])}
    drawn |= {"alphabet": np.zeros(4, np.int64), "drawer": np.arange(4)}
    drawn |= {"alphabet_names": np.array(["Greek"])}
    (place / name).mkdir(exist_ok=True)
    file = place / name / f"{name}.npz"
    file.write_bytes(other_npz(data, small if name == "femnist" else drawn))
    return place, lambda: DATASETS[name](Source(place))


class _Plain:
    """Pickled as NumPy pickles an array of bytes."""

    def __init__(self, content: bytes, shape: Any) -> None:
        self.array = np.frombuffer(content, np.uint8).reshape(shape)

    def __reduce__(self) -> Any:
        return self.array.__reduce__()


MEMO = [
    *[b"r\xff\xff\xff\x7f"] * 5,
    b"q\xff",
    b"j\xff\xff\xff\xff",
    b"\x8d" + b"\xff" * 7 + b"\x7f",
    b"2\x86" * 60,
]
MEMO += [
    b"(" * 3000,
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8a\xff",
    b"cos\nsystem\n",
    b"\x80\x63",
]


def read_cifar(place: Path, data: Data) -> tuple[Path, Read]:
    file = place / "batch"
    if data.draw(st.integers(0, 3)) == 0:
        file.write_bytes(spoilt(data, bytes(2 * 3073)))
        return file, lambda: published.read_binary(file, data.draw(st.sampled_from([1, 2])))
    labels: Any = data.draw(
        st.sampled_from([[1, 2], 5, None, [1], [[1], [2]], ["a", "b"], [2**70, 1], {}])
    )
    pixels = data.draw(st.sampled_from([_Plain(bytes(6144), (2, 3072)), _Plain(bytes(10), 10), 5]))
    content = pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2)
    content = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    if data.draw(st.booleans()):
        end = len(content)  # its labels come last; most of the rest are pixels
        place_of = data.draw(st.integers(2, 40) | st.integers(end - 20, end))
        content = content[:place_of] + data.draw(st.sampled_from(MEMO)) + content[place_of:]
    else:
        content = spoilt(data, content)
    file.write_bytes(content)
    return file, lambda: published.read_pickle(file, ["labels"])


def read_archive(place: Path, data: Data) -> tuple[Path, Read]:
    file, made = place / "a.tar.gz", io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name in ("cifar-10-batches-py/data_batch_1", "../../data_batch_2", "data_batch_3"):
            member = tarfile.TarInfo(name)
            member.size = 20
            member.type = data.draw(st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE]))
            tar.addfile(member, io.BytesIO(bytes(20)))
    content = made.getvalue()
    if data.draw(st.booleans()):
        content = gzip.compress(spoilt(data, gzip.decompress(content)))
    file.write_bytes(spoilt(data, content) if data.draw(st.booleans()) else content)
    return place, lambda: fetch.get_from("cifar10", file, place / "dest")


READERS: dict[str, Reader] = {
    "idx": read_idx,
    "npz": read_npz,
    "handwriting": read_handwriting,
    "cifar": read_cifar,
    "archive": read_archive,
}
