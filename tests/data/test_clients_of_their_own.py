"""Tiny ImageNet, FEMNIST and Omniglot: the real files where they are, else small ones of a form."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedlens as fl
from fedlens.data import DATASETS, Source
from fedlens.data.fetch import named_sets
from fedlens.setup import build, partition

DATA = os.environ.get("FEDLENS_DATA")


def real(folder: str) -> pytest.MarkDecorator:
    here = DATA is not None and (Path(DATA) / folder).is_dir()
    return pytest.mark.skipif(not here, reason=f"FEDLENS_DATA names no folder with {folder}")


def load(name: str, place: Path | str, **options: Any) -> fl.Dataset:
    return DATASETS[name](Source(Path(place)), **options)


WNIDS = ("n02000000", "n01000000")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    place = tmp_path / "tiny-imagenet-200"
    lines = []
    for label, wnid in enumerate(WNIDS):
        for i in range(3):
            file = place / "train" / wnid / "images" / f"{wnid}_{i}.JPEG"
            file.parent.mkdir(parents=True, exist_ok=True)
            colour = (255, 0, 0) if label else (0, 0, 255)
            Image.new("RGB", (8, 8), colour).save(file)
        (place / "train" / wnid / f"{wnid}_boxes.txt").write_text("n.JPEG\t0\t0\t5\t5\n")
        test = place / "val" / "images" / f"val_{label}.JPEG"
        test.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 80).save(test)
        lines.append(f"{test.name}\t{wnid}\t0\t0\t5\t5")
    (place / "val" / "val_annotations.txt").write_text("\n".join(lines))
    (place / "words.txt").write_text("n01000000\tgoldfish, Carassius auratus\nn02000000\tstork\n")
    unlabelled = place / "test" / "images" / "test_0.JPEG"
    unlabelled.parent.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(unlabelled)
    return place


def test_tiny_imagenet_is_read_from_its_folders(tiny: Path) -> None:
    found = load("tiny-imagenet", tiny.parent)
    assert found.classes == ("goldfish", "stork")
    assert found.shape == (3, 8, 8)
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.test.labels.tolist() == [0, 1]
    assert found.train.images[0, :, 0, 0].tolist()[0] > 200  # goldfish are red here
    assert load("tiny-imagenet", tiny, size=4).shape == (3, 4, 4)


def test_the_list_says_how_much_of_tiny_imagenet_is_there(tiny: Path) -> None:
    found = load("tiny-imagenet", tiny.parent)
    said = f"{len(found.train)} + {len(found.test)} images, 64×64, {found.num_classes} classes"
    rows = {row.name: row for row in named_sets(Source(data=tiny.parent))}
    assert rows["tiny-imagenet"] == ("tiny-imagenet", str(tiny), said)
    shutil.rmtree(tiny)
    rows = {row.name: row for row in named_sets(Source(data=tiny.parent))}
    published = "100,000 + 10,000 images, 64×64, 200 classes"
    assert rows["tiny-imagenet"] == ("tiny-imagenet", None, published)


def test_tiny_imagenet_with_gaps_is_told(tiny: Path) -> None:
    annotations = tiny / "val" / "val_annotations.txt"
    annotations.write_text(annotations.read_text().replace("n01000000", "n03000000"))
    with pytest.raises(ValueError, match="n03000000"):
        load("tiny-imagenet", tiny)
    annotations.unlink()
    with pytest.raises(ValueError, match="tiny-imagenet-200"):
        load("tiny-imagenet", tiny)


@real("tiny-imagenet-200")
def test_the_real_tiny_imagenet_loads() -> None:
    found = load("tiny-imagenet", str(DATA))
    assert found.shape == (3, 64, 64)
    assert torch.bincount(found.train.labels).tolist() == [500] * found.num_classes
    assert torch.bincount(found.test.labels).tolist() == [50] * found.num_classes


def leaf(place: Path, users: dict[str, list[int]], part: str, number: int = 0) -> Path:
    """A file as LEAF writes it: each user's images are as dark as their label says."""
    data = {u: {"x": [[y / 255] * 784 for y in ys], "y": ys} for u, ys in users.items()}
    file = place / part / f"all_data_{number}_niid_0_keep_0_{part}_9.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    sizes = [len(ys) for ys in users.values()]
    file.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": data}))
    return file


@pytest.fixture
def written(tmp_path: Path) -> Path:
    place = tmp_path / "femnist" / "data"
    leaf(place, {"f0001_02": [3, 61], "f0000_14": [10]}, "train")
    leaf(place, {"f0003_00": [5, 6, 7]}, "train", 1)
    leaf(place, {"f0000_14": [4]}, "test")
    return place


def test_femnist_is_read_from_the_files_of_leaf(written: Path) -> None:
    found = load("femnist", written.parents[1])
    assert found.classes[:11] == tuple("0123456789A")
    assert found.num_classes == 62
    assert found.train.labels.tolist() == [3, 61, 10, 5, 6, 7]
    assert torch.equal(found.train.images[:, 0, 13, 13].long(), found.train.labels)
    assert (
        found.train.columns["writer"].tolist() == ["f0001_02"] * 2 + ["f0000_14"] + ["f0003_00"] * 3
    )
    assert found.test.columns["writer"].tolist() == ["f0000_14"]
    assert load("femnist", written).train.labels.tolist() == [3, 61, 10, 5, 6, 7]


def test_writers_are_the_clients_of_femnist_unless_another_partition_is_named(
    written: Path,
) -> None:
    plain = {"dataset": "femnist", "model": "linear", "rounds": 1}
    described = fl.Experiment.of(plain)
    assert described.clients.partition == fl.Named("natural", {"column": "writer"})
    assert described.clients.count is None
    held = partition(described, written)[2]
    assert held.names == ("f0000_14", "f0001_02", "f0003_00")
    assert held.sizes.tolist() == [1, 2, 3]
    assert fl.Experiment.of(plain | {"dataset": "omniglot"}).clients.partition.options == {
        "column": "drawer"
    }
    other = fl.Experiment.of(plain | {"clients": {"partition": "iid", "count": 2}})
    assert partition(other, written)[2].names is None
    written_out = fl.Experiment.of(described.plain())
    assert written_out == described


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d.pop("user_data"),
            "cannot be read (it has no 'user_data'): make it again with LEAF",
        ),
        (
            lambda d: d["user_data"]["w"].pop("y"),
            "user w cannot be read (it has no 'y'): make it again with LEAF",
        ),
        (lambda d: d["user_data"]["w"].update(y=[1, 2]), "x is [1, 784] for 2 labels"),
        (lambda d: d["user_data"]["w"].update(y=[62]), "y must be 1 whole numbers from 0 to 61"),
        (lambda d: d["user_data"]["w"]["x"][0].__setitem__(3, 7.5), "numbers from 0 to 1"),
        (lambda d: d["user_data"].clear(), "has no images: make the files again"),
    ],
)
def test_files_of_leaf_that_are_wrong_are_named(tmp_path: Path, change: Any, message: str) -> None:
    file = leaf(tmp_path, {"w": [1]}, "train")
    leaf(tmp_path, {"w": [1]}, "test")
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError) as refused:
        load("femnist", tmp_path)
    assert message in str(refused.value)
    assert str(file) in str(refused.value) or str(file.parent) in str(refused.value)


def arrays(**changes: Any) -> dict[str, Any]:
    x = np.arange(6, dtype=np.uint8)[:, None, None] * np.ones((28, 28), np.uint8)
    content = {
        **{"x_train": x, "y_train": np.arange(6), "writer_train": np.array([0, 0, 2, 1, 1, 1])},
        **{"x_test": x[:2], "y_test": np.arange(2), "writer_test": np.array([2, 0])},
        "writers": np.array(["ann", "ben", "zoe"]),
    }
    return content | changes


def test_femnist_is_read_from_an_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "femnist_small.npz", **arrays())
    found = load("femnist", tmp_path)
    assert found.train.columns["writer"].tolist() == ["ann"] * 2 + ["zoe"] + ["ben"] * 3
    assert found.test.columns["writer"].tolist() == ["zoe", "ann"]
    assert found.num_classes == 62
    np.savez(tmp_path / "femnist_other.npz", **arrays())
    with pytest.raises(ValueError, match=r"femnist_other\.npz"):
        load("femnist", tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"writer_train": np.full(6, 3)}, "writer_train must be 6 whole numbers from 0 to 2"),
        ({"y_train": np.full(6, 62)}, "y_train must be 6 whole numbers from 0 to 61"),
        ({"writers": None}, "has no array 'writers': it needs writers, writer_train"),
    ],
)
def test_an_npz_of_femnist_that_is_wrong_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    content = {name: a for name, a in arrays(**changes).items() if a is not None}
    np.savez(tmp_path / "femnist.npz", **content)
    with pytest.raises(ValueError) as refused:
        load("femnist", tmp_path)
    assert message in str(refused.value)


def drawings() -> dict[str, Any]:
    """Two alphabets of two and one characters, each drawn by five people of their own."""
    label = np.repeat([0, 1, 2], 5)
    alphabet = np.array([1, 1, 0])[label]
    pixels = np.zeros((15, 28, 28), np.uint8)
    pixels[np.arange(15), label, 0] = 1
    return {
        "x_bits": np.packbits(pixels.reshape(15, -1), axis=1),
        "y": label.astype(np.uint16),
        "alphabet": alphabet.astype(np.uint8),
        "drawer": np.tile(np.arange(5, dtype=np.uint8), 3),
        "alphabet_names": np.array(["Greek", "Latin"]),
    }


def test_omniglot_is_unpacked_and_its_drawers_are_clients(tmp_path: Path) -> None:
    (tmp_path / "omniglot").mkdir()
    np.savez(tmp_path / "omniglot" / "omniglot.npz", **drawings())
    found = load("omniglot", tmp_path)
    assert found.classes == ("Latin 1", "Latin 2", "Greek 1")
    assert torch.bincount(found.train.labels).tolist() == [4, 4, 4]
    assert torch.bincount(found.test.labels).tolist() == [1, 1, 1]
    for part in (found.train, found.test):
        ink = part.images[:, 0, :, 0].argmax(1)
        assert torch.equal(ink, part.labels)
        assert int(part.images.max()) == 255
    everyone = set(found.train.columns["drawer"]) | set(found.test.columns["drawer"])
    assert len(everyone) == 10
    assert "Greek/05" in everyone
    assert len(load("omniglot", tmp_path, test_share=0.4).test) == 6


def test_omniglot_is_read_from_its_published_folders(tmp_path: Path) -> None:
    ink = np.full((105, 105), 255, np.uint8)
    ink[:, 50:60] = 0
    for part, alphabet in (
        ("background", "Latin"),
        ("background", "Greek"),
        ("evaluation", "Oriya"),
    ):
        for character in (1, 2):
            for drawer in range(1, 6):
                file = f"omniglot/images_{part}/{alphabet}/character{character:02d}"
                (tmp_path / file).mkdir(parents=True, exist_ok=True)
                picture = Image.fromarray(ink if character == 1 else ink.T).convert("1")
                picture.save(tmp_path / file / f"{100 * character:04d}_{drawer:02d}.png")
    found = load("omniglot", tmp_path)
    assert found.classes == ("Greek 1", "Greek 2", "Latin 1", "Latin 2", "Oriya 1", "Oriya 2")
    assert torch.bincount(found.train.labels).tolist() == [4] * 6
    assert torch.bincount(found.test.labels).tolist() == [1] * 6
    upright = found.train.labels % 2 == 0
    assert (found.train.images[upright, 0, :, 14] == 255).all()
    assert (found.train.images[upright, 0, :, 0] == 0).all()
    assert (found.train.images[~upright, 0, 14] == 255).all()
    people = set(found.train.columns["drawer"]) | set(found.test.columns["drawer"])
    assert people == {f"{a}/0{d}" for a in ("Latin", "Greek", "Oriya") for d in range(1, 6)}
    (tmp_path / file / "0100_x.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"0100_x\.png"):
        load("omniglot", tmp_path)
    for part in ("background", "evaluation"):
        shutil.rmtree(tmp_path / f"omniglot/images_{part}")
        (tmp_path / f"omniglot/images_{part}").mkdir()
    with pytest.raises(ValueError, match=r"ALPHABET/CHARACTER/\*\.png"):
        load("omniglot", tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_bits": np.zeros((15, 97), np.uint8)}, "x_bits is uint8 [15, 97]: expected"),
        ({"y": np.zeros(14, np.uint8)}, "y must be 15 whole numbers from 0: fix"),
        ({"alphabet": np.full(15, 2)}, "alphabet must be 15 whole numbers from 0 to 1"),
        ({"drawer": None}, "has no array 'drawer': it needs x_bits, y, alphabet, drawer"),
    ],
)
def test_an_omniglot_that_is_wrong_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    content = {name: a for name, a in (drawings() | changes).items() if a is not None}
    np.savez(tmp_path / "omniglot.npz", **content)
    with pytest.raises(ValueError) as refused:
        load("omniglot", tmp_path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "num_clients", "num_examples"), [("femnist", 300, 41_495), ("omniglot", 1000, 25_968)]
)
def test_real_handwriting_trains_with_the_people_who_wrote_it(
    name: str, num_clients: int, num_examples: int
) -> None:
    if DATA is None or not (Path(DATA) / name).is_dir():
        pytest.skip(f"FEDLENS_DATA names no folder with {name}")
    clients = fl.Clients(per_round=20)
    described = fl.Experiment(fl.Named(name), fl.Named("linear"), rounds=1, clients=clients)
    setup = build(described, Path(DATA))
    held = setup.federation.everyone(0)
    assert (len(held), len(held.index)) == (num_clients, num_examples)
    assert held.names is not None
    assert len(set(held.names)) == num_clients
    assert fl.run(described, data=DATA).status == "finished"
