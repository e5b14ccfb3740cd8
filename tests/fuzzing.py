"""Every reader, given files that nobody wrote: a program, for it limits its own memory and time.

    python -m tests.fuzzing 2000        # so many cases in all
    python -m tests.fuzzing 200 idx     # of one reader

A reader may take a file or refuse it by a ValueError of one line that names the file. Anything else
fails: another error, more memory than `ROOM`, more seconds of the processor than `SECONDS` a case.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import re
import resource
import signal
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

import fedlens as fl
from fedlens.algorithms import ALGORITHMS
from fedlens.data import DATASETS, Source, cifar, curation, fetch, idx, pictures, store
from fedlens.data.partitions import PARTITIONS
from fedlens.data.partitions.by_file import published
from fedlens.experiment import Experiment
from fedlens.models import MODELS
from fedlens.models.weights import load_weights
from fedlens.options import options_of
from fedlens.report.page import html
from fedlens.report.runs import headline, run_blocks
from fedlens.run_files import checksum
from fedlens.runs.folder import RunFolder
from fedlens.runs.records import read_all
from fedlens.setup import build
from fedlens.tables import apply_override, parse_axis

ROOM = 1 << 30  # bytes, besides what the program takes before it starts
SECONDS = 10  # of the processor, a case

Data = st.DataObject
NUMBERS = (0, 1, 5, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 5, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf),
    *("", "x", "\ud800", "\x1b[2J", "y" * 5000, "../../x", "=1+1", "9" * 400, "~nobody/x"),
    *([], {}, [[]], [None], [1, "x"], {"": None}, {"a": {"b": 1}}, [[1], [2, 3]], [{}]),
)


MANY_COLUMNS = ",".join(f"c{i}" for i in range(100_000))


class TooLong(BaseException):
    """No reader may take this for a mistake in a file."""


def _too_long(*_: Any) -> None:
    raise TooLong


def spoilt(data: Data, content: bytes) -> bytes:
    """Bytes cut, flipped, repeated, or with another number in some place, mostly near the start."""
    for _ in range(data.draw(st.integers(1, 3))):
        near = data.draw(st.booleans())
        place = data.draw(st.integers(0, min(len(content), 80 if near else len(content))))
        kind = data.draw(st.sampled_from(["cut", "number", "bytes", "repeat"]))
        if kind == "cut":
            content = content[:place]
        elif kind == "number":
            size = data.draw(st.sampled_from([1, 2, 4, 8]))
            number = data.draw(st.sampled_from(NUMBERS)) % 256**size
            order: Any = data.draw(st.sampled_from(["big", "little"]))
            content = content[:place] + number.to_bytes(size, order) + content[place + size :]
        elif kind == "bytes":
            content = content[:place] + data.draw(st.binary(max_size=8)) + content[place:]
        else:
            content = content[:place] + content[place : place + 200] * 3 + content[place:]
    return content


def altered(data: Data, value: Any) -> Any:
    """Tables and lists with a part of another kind, or without one."""
    if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 4)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = data.draw(st.sampled_from(keys))
        changed = dict(value) if isinstance(value, dict) else list(value)
        if data.draw(st.integers(0, 9)) == 0:
            del changed[key]
        else:
            changed[key] = altered(data, value[key])
        return changed
    return data.draw(st.sampled_from(WRONG))


def other_json(data: Data, value: Any) -> bytes:
    """A JSON file with a part changed, its bytes spoilt, or nested beyond measure."""
    kind = data.draw(st.sampled_from(["part", "part", "part", "bytes", "deep"]))
    if kind == "deep":
        return data.draw(st.sampled_from([b"[", b'{"a":'])) * 100_000
    if kind == "bytes":
        return spoilt(data, json.dumps(value).encode())
    return json.dumps(altered(data, value)).encode()


def other_text(data: Data, text: str, words: list[str]) -> bytes:
    """Text with one of its words changed, or its bytes spoilt."""
    kind = data.draw(st.sampled_from(["word", "word", "bytes", "long"]))
    if kind == "bytes":
        return spoilt(data, text.encode())
    old = data.draw(st.sampled_from(words))
    new = data.draw(
        st.sampled_from(["", "-1", "1e400", "nan", '"', "\n", ",", "\0", "9" * 30, "é"])
    )
    new = data.draw(st.sampled_from(["z" * 200_000, MANY_COLUMNS])) if kind == "long" else new
    return text.replace(old, new, data.draw(st.integers(1, 3))).encode()


def other_array(data: Data) -> Any:
    shape = data.draw(st.sampled_from([(), (0,), (4,), (3,), (4, 5, 5), (4, 5, 5, 2), (2, 0, 3)]))
    kind = data.draw(st.sampled_from(["u1", "i8", "u8", "f4", "U3", "M8[s]", "?", "c8", "O", "V4"]))
    fill = data.draw(st.sampled_from([0, 1, 7, 200]))
    array = np.zeros(shape, kind)
    if kind in ("u1", "i8", "u8", "f4"):
        array += np.array(fill, kind)
    if kind == "u8" and data.draw(st.booleans()):
        array += np.array(2**63, kind)
    if kind == "i8" and data.draw(st.booleans()):
        array += data.draw(st.sampled_from([-9, 2**62, 2**40]))
    return array


def other_npz(data: Data, arrays: dict[str, Any]) -> bytes:
    """A NumPy file with another array, another name, a lying header, or spoilt bytes."""
    kind = data.draw(st.sampled_from(["array", "array", "name", "header", "bytes", "method"]))
    arrays = dict(arrays)
    chosen = data.draw(st.sampled_from(sorted(arrays)))
    if kind == "array":
        arrays[chosen] = other_array(data)
    if kind == "name":
        arrays[data.draw(st.sampled_from(["x", "", "y_train", "a" * 300]))] = arrays.pop(chosen)
    file = io.BytesIO()
    method = data.draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=True)
            content = member.getvalue()
            if kind == "header" and name == chosen:
                shape = str(np.shape(array)).encode()
                said = data.draw(
                    st.sampled_from([b"(9999999999, 9)", b"(-1,)", b"(2, 2)", b"((),)"])
                )
                content = content.replace(shape, said.ljust(len(shape))[: max(len(shape), 4)])
            archive.writestr(f"{name}.npy" if name != "plain" else "readme.txt", content)
    made = file.getvalue()
    if kind == "method":
        made = made.replace(b"PK\x01\x02", b"PK\x01\x02", 1)
        place = made.index(b"PK\x01\x02") + 10
        made = made[:place] + data.draw(st.sampled_from([b"\x63\0", b"\x0c\0"])) + made[place + 2 :]
    return spoilt(data, made) if kind == "bytes" else made


def picture(kind: str = "png", side: int = 5) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(side * side * 3, dtype=np.uint8).reshape(side, side, 3)).save(
        file, kind
    )
    return file.getvalue()


Read = Callable[[], object]
Reader = Callable[[Path, Data], tuple[Path, Read]]


def read_idx(place: Path, data: Data) -> tuple[Path, Read]:
    zipped, ndim = data.draw(st.booleans()), data.draw(st.sampled_from([1, 3]))
    shape = [data.draw(st.sampled_from([2, 3, *NUMBERS])) % 2**32 for _ in range(ndim)]
    content = bytes([0, 0, 8, ndim]) + b"".join(n.to_bytes(4, "big") for n in shape)
    content += bytes(data.draw(st.integers(0, 40)))
    if data.draw(st.booleans()):
        content = spoilt(data, content)
    if zipped and data.draw(st.integers(0, 20)) == 0:
        content += bytes(30_000_000)  # a small bomb
    file = place / ("a.gz" if zipped else "a")
    packed = gzip.compress(content) if zipped else content
    file.write_bytes(spoilt(data, packed) if zipped and data.draw(st.booleans()) else packed)
    return file, lambda: idx.read(file, ndim)


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
        return file, lambda: cifar.read_binary(file, data.draw(st.sampled_from([1, 2])))
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
    return file, lambda: cifar.read_pickle(file, ["labels"])


CSV = "path,label,client,lat,lon,split,more\n" + "".join(
    f"{i}.png,{i % 2},ann,{i},{i},{'test' if i > 3 else 'train'},x\n" for i in range(6)
)


def read_csv(place: Path, data: Data) -> tuple[Path, Read]:
    for i in range(6):
        (place / f"{i}.png").write_bytes(picture())
    file = place / "a.csv"
    words = ["path", "label", "lat", "split", "0.png", ",1,", "ann", "train", "test", "\n", "x"]
    file.write_bytes(other_text(data, CSV, words))
    return place, lambda: DATASETS["csv"](Source(), path=str(file))


def read_split(place: Path, data: Data) -> tuple[Path, Read]:
    text = "user_id,image_id,class\n0,0,0\n1,1,1\n7,2,0\n"
    content = other_text(data, text, ["user_id", "class", ",0", "1", "\n", "7"])
    zipped = data.draw(st.booleans())
    file = place / ("a.csv.gz" if zipped else "a.csv")
    packed = gzip.compress(content) if zipped else content
    if zipped and data.draw(st.integers(0, 30)) == 0:
        packed = gzip.compress(bytes(100_000_000), 1)
    file.write_bytes(spoilt(data, packed) if zipped and data.draw(st.booleans()) else packed)
    rng = np.random.default_rng(0)
    return file, lambda: published(TOY.train, 2, None, rng, path=str(file))


def read_folder(place: Path, data: Data) -> tuple[Path, Read]:
    kind = data.draw(st.sampled_from(["png", "jpeg", "gif", "bmp", "tiff", "ppm"]))
    for name in ("cat", "dog"):
        (place / "p" / name).mkdir(parents=True)
        for i in range(3):
            broken = data.draw(st.booleans())
            content = spoilt(data, picture(kind)) if broken else picture(kind)
            (place / "p" / name / f"{i}.png").write_bytes(content)
    if data.draw(st.integers(0, 9)) == 0:
        odd = data.draw(st.sampled_from([b"\xff.png", b"\x1b[2J.png", b"a" * 200 + b".png"]))
        Path(os.fsdecode(os.fsencode(place / "p" / "cat") + b"/" + odd)).write_bytes(picture(kind))
    if data.draw(st.integers(0, 9)) == 0:
        bad = Path(os.fsdecode(os.fsencode(place / "p") + b"/\xff\xfe"))
        bad.mkdir()
        (bad / "1.png").write_bytes(picture(kind))
    options: dict[str, Any] = {"on_error": data.draw(st.sampled_from(["stop", "skip"]))}
    options["size"] = data.draw(st.sampled_from([None, 4, 0, 2**31, 2**62]))

    def read() -> None:
        try:
            DATASETS["folder"](Source(), path=str(place / "p"), **options)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error  # its size may be what is wrong

    return place, read


def read_picture(place: Path, data: Data) -> tuple[Path, Read]:
    file = place / "a.png"
    kind = data.draw(st.sampled_from(["png", "jpeg", "gif", "bmp", "tiff", "ppm", "webp"]))
    file.write_bytes(spoilt(data, picture(kind, 20)))
    return file, lambda: pictures.read(file, data.draw(st.sampled_from([1, 3])), 8)


def read_curation(place: Path, data: Data) -> tuple[Path, Read]:
    kind = data.draw(st.sampled_from(["inaturalist", "landmarks", "published"]))
    wrong = data.draw(st.integers(0, 2))
    if kind == "inaturalist":
        images = [{"id": i, "file_name": f"a/{i}.jpg"} for i in range(120)]
        notes = [{"image_id": i, "category_id": 3} for i in range(120)]
        about = {"images": images, "annotations": notes, "categories": [{"id": 3, "name": "owl"}]}
        places = [{"id": i, "user_id": i % 3, "lat": 1.0, "lon": 2.0} for i in range(120)]
        for i, (name, content) in enumerate(
            zip(curation.INATURALIST, (about, places, about), strict=True)
        ):
            made = other_json(data, content) if i == wrong else json.dumps(content).encode()
            (place / name).write_bytes(made)
        chosen = data.draw(st.sampled_from(["inaturalist-user-120k", "inaturalist-geo-100"]))
        return place, lambda: curation.listing(chosen, place)
    if kind == "landmarks":
        names = ("train_clean.csv", "train_attribution.csv")
        texts = ("landmark_id,images\n3,a b c\n4,d\n", "id,author\na,x\nb,y\nc,x\nd,z\n")
        chosen = "landmarks-user-160k"
    else:
        names = ("federated_train_x.csv", "test.csv")
        texts = ("user_id,image_id,class\n1,a,0\n2,b,1\n", "image_id,class\nc,0\nd,1\n")
        chosen = "inaturalist-user-120k"
    for i, (name, text) in enumerate(zip(names, texts, strict=True)):
        made = other_text(data, text, ["a", "1", ",", "\n", "id"]) if i == wrong else text.encode()
        (place / name).write_bytes(made)
    return place, lambda: curation.listing(chosen, place)


def read_store(place: Path, data: Data) -> tuple[Path, Read]:
    listing = {"ids": np.array(["a", "b", "c"]), "labels": np.array([0, 1, 0]), "size": np.array(2)}
    listing |= {
        "num_train": np.array(2),
        "classes": np.array(["x", "y"]),
        "column_user": np.arange(3),
    }
    about = {
        "name": "n",
        "size": 2,
        "num_train": 2,
        "num_test": 1,
        "num_left_out": 0,
        "left_out": [],
    }
    about |= {"sha256": "", "mean": [0.5] * 3, "std": [1.0] * 3}
    wrong = data.draw(st.sampled_from(["listing", "manifest", "images"]))
    made = io.BytesIO()
    np.savez(made, **listing)  # type: ignore[arg-type]
    listed = other_npz(data, listing) if wrong == "listing" else made.getvalue()
    (place / "listing.npz").write_bytes(listed)
    manifest = other_json(data, about) if wrong == "manifest" else json.dumps(about).encode()
    (place / "manifest.json").write_bytes(manifest)
    pixels = bytes(3 * 2 * 2 * 3)
    (place / "images.u8").write_bytes(spoilt(data, pixels) if wrong == "images" else pixels)

    def read() -> None:
        store.state(place)
        store.dataset(place)

    return place, read


TOML = """
dataset = { name = "npz", path = "d.npz" }
model = "linear"
rounds = 3
augment = { crop = 2, flip = true }
[clients]
count = 100
per_round = 0.1
partition = { name = "dirichlet", alpha = 0.3 }
[local]
lr = 1
[[algorithm]]
name = "fedprox"
mu = 0.01
"""
DEEP = [
    "a." * 100_000 + "b = 1",
    "x = " + "[" * 100_000,
    "x = {" + "a={" * 2000,
    "[" + "a." * 5000 + "b]",
]


def read_experiment(place: Path, data: Data) -> tuple[Path, Read]:
    as_json = data.draw(st.booleans())
    file = place / ("a.json" if as_json else "a.toml")
    if as_json:
        import tomllib

        file.write_bytes(other_json(data, tomllib.loads(TOML)))
    elif data.draw(st.integers(0, 5)) == 0:
        file.write_text(data.draw(st.sampled_from(DEEP)) + TOML, encoding="utf-8")
    else:
        words = ["linear", "3", "100", "0.1", "dirichlet", "=", "0.3", "[local]", "true", "name"]
        file.write_bytes(other_text(data, TOML, words))

    def read() -> None:
        try:
            Experiment.read(file)
        except ValueError as error:
            if type(error) is not ValueError:  # of Python's own, which would name no file
                raise TypeError(str(error)) from error
            raise ValueError(f"{file}: {error}") from error  # what is wrong may be a value in it

    return file, read


def read_override(place: Path, data: Data) -> tuple[Path, Read]:
    key = data.draw(
        st.sampled_from(["a", "a.b", "algorithm.x.mu", "", "." * 10, "a." * 50_000 + "b"])
    )
    value = data.draw(
        st.sampled_from(
            ["1", "x", "[1,", "[" * 50_000, "9" * 5000, "1e999", "{a=1}", "\ud800", "'"]
        )
        | st.text(max_size=20)
    )
    content: dict[str, Any] = {"a": 3, "b": {"c": 1}, "algorithm": ["x"]}

    def read() -> None:
        for function in (lambda text: apply_override(content, text), parse_axis):
            try:
                function(f"{key}={value}")
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error

    return place, read


STATE = {"1.weight": torch.zeros(3, 25), "1.bias": torch.zeros(3)}


def other_state(data: Data) -> Any:
    kinds: list[Any] = [
        {**STATE, 7: torch.zeros(2)},
        {1: torch.zeros(2)},
        {**STATE, "1.bias": torch.zeros(3).to_sparse()},
        {**STATE, "1.bias": torch.zeros(3, device="meta")},
        {**STATE, "1.weight": torch.zeros(1).expand(3, 25)},
        {**STATE, "1.bias": torch.zeros(3, dtype=torch.complex64)},
        {**STATE, "1.bias": 5},
        {"model": STATE},
        [torch.zeros(3)],
        torch.zeros(3),
        {},
        {**STATE, "1.bias": torch.zeros(())},
        {**STATE, "1.bias": torch.zeros(3, dtype=torch.bool)},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch is about to drop quantised tensors
        kinds.append(
            {**STATE, "1.bias": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)}
        )
    return data.draw(st.sampled_from(kinds))


def read_weights(place: Path, data: Data) -> tuple[Path, Read]:
    kind = data.draw(st.sampled_from(["safetensors", "pth", "pt"]))
    file = place / f"a.{kind}"
    if kind == "safetensors":
        file.write_bytes(spoilt(data, save(STATE)))
    else:
        made = io.BytesIO()
        other = data.draw(st.booleans())
        old = data.draw(st.booleans())
        torch.save(
            other_state(data) if other else STATE, made, _use_new_zipfile_serialization=not old
        )
        file.write_bytes(made.getvalue() if other else spoilt(data, made.getvalue()))
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, 3))
    return file, lambda: load_weights(module, str(file))


RUN: dict[str, Any] = {
    "manifest.json": {
        **{"partition": "abc", "engine": "sequential", "precision": "fp32", "seed": 3, "code": []},
        **{"classes": ["a", "b"], "parameters": 10, "weights": None, "device": "cpu"},
    },
    "summary.json": {
        **{"status": "finished", "rounds": 2, "final": {"test_accuracy": 0.5}, "emd": 0.5},
        **{"best": {"test_accuracy": {"value": 0.5, "round": 2}}, "seconds": {"total": 3.0}},
        **{"twin": {"accuracy": 0.9}, "bytes_up": 10, "peak_memory_bytes": 10},
    },
    "partition.json": {"num_clients": 2, "label_counts": [[1, 2], [3, 4]]},
    "evaluation.json": {"confusion": [[1, 2, 0], [0, 1, 0]], "client_accuracy": [0.5, 0.7]},
    "checkpoint/state-000002.json": {
        "round": 2,
        "sha256": "",
        "records": {"num_records": 2, "num_bytes": 400, "sha256": ""},
        "state": {},
    },
}
ROUNDS = [
    {"round": i, "test_accuracy": 0.5, "test_loss": 1.0, "train_loss": 1.0, "seconds": 1.0,
     "bytes_up": 1, "bytes_down": 1, "client_accuracy_median": 0.5, "client_accuracy_min": 0.1,
     "client_accuracy_max": 0.9, "client_accuracy_p10": 0.2, "relative_accuracy": 0.7}
    for i in (1, 2)
]  # fmt: skip


def read_run(place: Path, data: Data) -> tuple[Path, Read]:
    folder = place / "run"
    (folder / "checkpoint").mkdir(parents=True)
    wrong = data.draw(st.sampled_from([*RUN, "rounds.jsonl", "experiment.toml"]))
    for name, content in RUN.items():
        made = other_json(data, content) if name == wrong else json.dumps(content).encode()
        if name.startswith("checkpoint"):
            with suppress(ValueError, RecursionError):  # signed, as whoever altered it could do
                index = json.loads(made)
                made = json.dumps({"sha256": checksum(index), "index": index}).encode()
        (folder / name).write_bytes(made)
    rounds = altered(data, ROUNDS) if wrong == "rounds.jsonl" else ROUNDS
    lines = rounds if isinstance(rounds, list) else [rounds]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    words = ["linear", "3", "100", "0.1", "dirichlet", "=", "0.3", "[local]", "true", "name"]
    toml = other_text(data, TOML, words) if wrong == "experiment.toml" else TOML.encode()
    (folder / "experiment.toml").write_bytes(toml)

    def read() -> None:
        runs = read_all([folder])
        html("a", headline(runs), run_blocks(runs), str)
        RunFolder(folder).load_checkpoint(torch.device("cpu"))

    return folder, read


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


def _toy() -> fl.Dataset:
    images, labels = torch.zeros(8, 1, 5, 5, dtype=torch.uint8), torch.arange(8) % 2
    train = fl.Examples(
        images, labels, {"user": np.arange(8), "lat": np.zeros(8), "lon": np.zeros(8)}
    )
    return fl.Dataset("toy", train, train, ("a", "b"))


TOY = _toy()
KEYS = {
    **dict.fromkeys(("rounds", "seed", "outputs", "train_last")),
    "augment": ("crop", "resized", "aspect"),
    "clients": ("count", "per_round", "seed", "holdout"),
    "local": ("epochs", "batch_size", "lr", "momentum", "weight_decay"),
    "server": ("lr",),
    "evaluate": ("every", "at", "validation"),
}
LARGE: tuple[Any, ...] = (
    *(0, 1, 2, -1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, -(2**63), 10**400),
    *(
        0.5,
        1e-320,
        1e30,
        3e38,
        1e39,
        1e308,
        -1e308,
        math.inf,
        -math.inf,
        math.nan,
        [1],
        [2**62],
        "x",
    ),
)


def read_numbers(place: Path, data: Data) -> tuple[Path, Read]:
    """Numbers beyond all measure in every key, and in every option of whatever has a name."""
    large = st.sampled_from(LARGE)
    tables: dict[str, Any] = {
        "dataset": TOY,
        "model": "linear",
        "rounds": 1,
        "engine": "sequential",
    }
    tables["clients"] = {"count": 4}
    kind = data.draw(st.sampled_from(["key", "algorithm", "partition", "model"]))
    if kind == "key":
        key = data.draw(st.sampled_from(sorted(KEYS)))
        inner = KEYS[key]
        if inner is None:
            tables[key] = data.draw(large)
        else:
            given = {name: data.draw(large) for name in inner if data.draw(st.booleans())}
            tables[key] = tables.get(key, {}) | given
    else:
        table: Any = {"algorithm": ALGORITHMS, "partition": PARTITIONS, "model": MODELS}[kind]
        name = data.draw(st.sampled_from(sorted(table)))
        chosen = {o: data.draw(large) for o in options_of(table[name]) if data.draw(st.booleans())}
        chosen |= {"column": "user"} if name == "natural" else {}
        if kind == "partition":
            tables["clients"]["partition"] = {"name": name, **chosen}
        else:
            tables[kind] = {"name": name, **chosen}

    def read() -> None:
        try:
            build(Experiment.of(tables)).engine.close()
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    return place, read


READERS: dict[str, Reader] = {
    name.removeprefix("read_"): reader
    for name, reader in list(globals().items())
    if name.startswith("read_") and name != "read_all"
}


def attempt(reader: Reader, data: Data) -> None:
    """One case."""
    with tempfile.TemporaryDirectory() as made:
        file, read = reader(Path(made), data)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            read()
        except ValueError as error:
            lines = str(error).splitlines()
            assert len(lines) == 1, f"{len(lines)} lines: {error}"
            assert str(file) in lines[0] or file.name in lines[0], f"{file} is not named: {error}"
            assert not re.search(r"\b[A-Z]\w+Error\b", lines[0]), f"a type is named: {error}"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def fuzz(name: str, cases: int) -> None:
    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        phases=[Phase.explicit, Phase.generate],  # what fails is told at once
    )
    @given(st.data())
    def run(data: Data) -> None:
        attempt(READERS[name], data)

    run()


def main() -> None:
    cases, *names = sys.argv[1:]
    chosen = names or list(READERS)
    warnings.simplefilter("ignore")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)
    signal.signal(signal.SIGVTALRM, _too_long)
    failed = []
    for name in chosen:
        started = time.process_time()
        try:
            fuzz(name, -(-int(cases) // len(chosen)))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            import traceback

            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.process_time() - started:.1f} s", flush=True)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} readers held; failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
