"""Folders and lists of images, and what is prepared from them."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fedlens.core.federation import Pool
from fedlens.data import DATASETS, Source, curation, pictures, store
from fedlens.data.partitions.found import published
from tests.fuzzing.cases import (
    TOY,
    Data,
    Read,
    Reader,
    other_json,
    other_npz,
    other_text,
    picture,
    spoilt,
)

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


BOMB = gzip.compress(bytes(100_000_000), 1)


def read_split(place: Path, data: Data) -> tuple[Path, Read]:
    text = "user_id,image_id,class\n0,0,0\n1,1,1\n7,2,0\n"
    content = other_text(data, text, ["user_id", "class", ",0", "1", "\n", "7"])
    zipped = data.draw(st.booleans())
    file = place / ("a.csv.gz" if zipped else "a.csv")
    packed = gzip.compress(content) if zipped else content
    if zipped and data.draw(st.integers(0, 30)) == 0:
        packed = BOMB
    file.write_bytes(spoilt(data, packed) if zipped and data.draw(st.booleans()) else packed)
    pool = Pool(TOY.train, 2, 0, np.random.default_rng(0))
    return file, lambda: published(pool, path=str(file))


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
    return file, lambda: pictures.read(file, pictures.Form(8, data.draw(st.sampled_from([1, 3]))))


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


READERS: dict[str, Reader] = {
    "csv": read_csv,
    "split": read_split,
    "folder": read_folder,
    "picture": read_picture,
    "curation": read_curation,
    "store": read_store,
}
