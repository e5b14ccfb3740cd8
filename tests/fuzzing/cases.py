"""What cases are made of: sound content, and ways to spoil it."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image

import fedlens as fl

Data = st.DataObject
NUMBERS = (0, 1, 5, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 5, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf),
    *("", "x", "\ud800", "\x1b[2J", "y" * 5000, "../../x", "=1+1", "9" * 400, "~nobody/x"),
    *([], {}, [[]], [None], [1, "x"], {"": None}, {"a": {"b": 1}}, [[1], [2, 3]], [{}]),
)


MANY_COLUMNS = ",".join(f"c{i}" for i in range(100_000))


Read = Callable[[], object]
Reader = Callable[[Path, Data], tuple[Path, Read]]


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
TOML_WORDS = ["linear", "3", "100", "0.1", "dirichlet", "=", "0.3", "[local]", "true", "name"]


def _toy() -> fl.Dataset:
    images, labels = torch.zeros(8, 1, 5, 5, dtype=torch.uint8), torch.arange(8) % 2
    train = fl.Examples(
        images, labels, {"user": np.arange(8), "lat": np.zeros(8), "lon": np.zeros(8)}
    )
    return fl.Dataset("toy", train, train, ("a", "b"))


TOY = _toy()


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
