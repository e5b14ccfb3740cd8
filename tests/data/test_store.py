"""Stores: decoded once, gone on with after a stop, checked, and trained on."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.data import DATASETS, Source, store
from fedlens.data.curation import Listing, listing
from fedlens.data.pictures import Form, read
from fedlens.setup import build
from tests.command_line import Ended
from tests.data.naturalists import make

NAME = "inaturalist-user-120k"


@pytest.fixture
def nature(tmp_path: Path) -> Path:
    return make(tmp_path / "nature", {1: 101, 2: 103, 3: 20}, num_val=5)


def prepared(nature: Path, watch: store.Progress | None = None) -> dict[str, Any]:
    place = nature.parent / f"{NAME}-8"
    return store.prepare(NAME, listing(NAME, nature), nature, place, 8, watch)


def images_of(nature: Path) -> dict[str, Path]:
    return {file.stem: file for file in nature.rglob("*.jpg")}


def test_a_store_holds_every_image_once_and_is_mapped(nature: Path) -> None:
    made = prepared(nature)
    assert (made["num_train"], made["num_test"], made["num_left_out"]) == (200, 10, 0)
    found = DATASETS[NAME](Source(nature.parent), size=8)
    assert found.shape == (3, 8, 8)
    assert found.classes == ("Avis 1", "Avis 2")
    assert (len(found.train), len(found.test)) == (200, 10)
    files = images_of(nature)
    for part in (found.train, found.test):
        for i in (0, len(part) // 2, len(part) - 1):
            expected = read(files[part.columns["image_id"][i]], Form(8, 3))
            assert np.array_equal(part.images[i].permute(1, 2, 0).numpy(), expected)
    exact = found.train.images.double() / 255
    assert found.mean == pytest.approx(exact.mean((0, 2, 3)).tolist())
    assert found.std == pytest.approx(exact.std((0, 2, 3), correction=0).tolist())
    pixels = nature.parent / f"{NAME}-8" / "images.u8"
    before = pixels.read_bytes()
    assert found.train.images.data_ptr() + 200 * 192 == found.test.images.data_ptr()  # one mapping
    found.train.images[0] = 7
    assert pixels.read_bytes() == before
    assert sorted(f.name for f in pixels.parent.iterdir()) == [
        *("images.u8", "listing.npz", "manifest.json")
    ]


def test_a_share_set_apart_for_validation_stays_in_the_mapped_file(nature: Path) -> None:
    prepared(nature)
    described = fl.Experiment(
        dataset=fl.Named(NAME, {"size": 8}),
        model=fl.Named("linear"),
        rounds=1,
        evaluate=fl.Evaluate(on=("validation", "test"), validation=0.2),
    )
    setup = build(described, nature.parent)
    train, apart = setup.federation.examples, setup.parts["validation"]
    assert (len(train), len(apart)) == (160, 40)
    assert train.images is apart.images is setup.dataset.train.images
    files = images_of(nature)
    for part in (train, apart):
        expected = [read(files[name], Form(8, 3)) for name in part.columns["image_id"][:5]]
        shown = part.read(slice(5)).permute(0, 2, 3, 1).numpy()
        assert np.array_equal(shown, np.stack(expected))
    assert fl.run(described, data=nature.parent).status == "finished"


def test_images_that_are_missing_or_broken_are_left_out_and_listed(nature: Path) -> None:
    listed = listing(NAME, nature)
    files = images_of(nature)
    files[listed.ids[0]].unlink()
    files[listed.ids[150]].write_bytes(b"no picture")
    whole = files[listed.ids[205]].read_bytes()
    files[listed.ids[205]].write_bytes(whole[: len(whole) // 2])
    made = prepared(nature)
    assert (made["num_train"], made["num_test"], made["num_left_out"]) == (198, 9, 3)
    assert made["left_out"] == [
        {"id": listed.ids[0], "why": "missing"},
        {"id": listed.ids[150], "why": "cannot be decoded"},
        {"id": listed.ids[205], "why": "cannot be decoded"},
    ]
    found = DATASETS[NAME](Source(nature.parent), size=8)
    gone = {out["id"] for out in made["left_out"]}
    assert found.train.columns["image_id"].tolist() == [
        name for name in listed.ids[:200] if name not in gone
    ]
    last = read(files[found.test.columns["image_id"][-1]], Form(8, 3))
    assert np.array_equal(found.test.images[-1].permute(1, 2, 0).numpy(), last)


def test_work_that_was_stopped_goes_on_and_is_not_done_again(nature: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "CHUNK", 50)
    whole = prepared(nature)
    for file in (nature.parent / f"{NAME}-8").iterdir():
        file.unlink()

    def stop(done: int, total: int, doing: str) -> None:
        if done >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(nature, stop)
    with pytest.raises(ValueError, match="is incomplete: go on with `fedlens data prepare`"):
        DATASETS[NAME](Source(nature.parent), size=8)
    files = images_of(nature)
    for name in listing(NAME, nature).ids[:100]:
        files[name].unlink()  # what is done is not looked at again
    told: list[tuple[int, str]] = []
    again = prepared(nature, lambda done, _, doing: told.append((done, doing)))
    assert [done for done, doing in told if doing == "decoding"] == [100, 150, 200, 210]
    assert [done for done, doing in told if doing == "writing"] == [50, 100, 150, 200, 210]
    assert again == whole


@pytest.mark.parametrize("damage", ["lost", "cut", "emptied", "a bit", "of zeros", "marks lost"])
def test_pixels_that_were_lost_while_work_was_stopped_are_decoded_again(
    nature: Path, monkeypatch, damage: str
) -> None:
    monkeypatch.setattr(store, "CHUNK", 50)
    whole = prepared(nature)
    place = nature.parent / f"{NAME}-8"
    for file in place.iterdir():
        file.unlink()

    def stop(done: int, total: int, doing: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(nature, stop)
    part = place / "images.part"
    content = part.read_bytes()
    assert any(content)
    damaged = {
        "cut": content[:-192],
        "emptied": b"",
        "a bit": content[:100] + bytes([content[100] ^ 1]) + content[101:],
        "of zeros": bytes(len(content)),
    }
    if damage in damaged:
        part.write_bytes(damaged[damage])
    else:
        (part if damage == "lost" else place / "done.part").unlink()
    assert prepared(nature) == whole, "the checksum of all pixels is the same"


def test_a_full_disk_is_said_in_a_line_before_anything_is_mapped(nature: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (210 * 8 * 8 * 3 - 1, limits[1]))
    try:
        with pytest.raises(OSError, match=r"images.part needs 40,320 bytes .*: free some space"):
            prepared(nature)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert prepared(nature)["num_train"] == 200


def test_one_at_a_time_prepares_a_store(nature: Path) -> None:
    def again(done: int, total: int, doing: str) -> None:
        with pytest.raises(ValueError, match="being written"):
            prepared(nature)

    assert prepared(nature, again)["num_train"] == 200


def test_a_whole_store_is_kept_and_a_damaged_one_is_made_again(nature: Path) -> None:
    made = prepared(nature)
    pixels = nature.parent / f"{NAME}-8" / "images.u8"
    told: list[int] = []
    assert prepared(nature, lambda done, *_: told.append(done)) == made
    assert not told
    content = pixels.read_bytes()
    pixels.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert prepared(nature, lambda done, *_: told.append(done)) == made
    assert told
    assert pixels.read_bytes() == content
    pixels.write_bytes(content[:-5])
    with pytest.raises(ValueError, match="cut short"):
        DATASETS[NAME](Source(nature.parent), size=8)


def test_other_metadata_do_not_get_into_a_store(nature: Path) -> None:
    prepared(nature)
    listed = listing(NAME, nature)
    other = Listing(listed.ids[::-1], listed.labels, listed.num_train, listed.classes, {})
    with pytest.raises(ValueError, match="metadata"):
        store.prepare(NAME, other, nature, nature.parent / f"{NAME}-8", 8)


def test_folders_that_are_wrong_are_named(nature: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    listed = listing(NAME, nature)
    with pytest.raises(ValueError, match="found"):
        store.prepare(NAME, listed, tmp_path / "empty", tmp_path / "s", 8)
    with pytest.raises(ValueError, match="is not a folder: name the one that holds the images"):
        store.prepare(NAME, listed, tmp_path / "nowhere", tmp_path / "s", 8)
    with pytest.raises(ValueError, match="size is 0: choose a number of pixels"):
        store.prepare(NAME, listed, nature, tmp_path / "s", 0)
    with pytest.raises(ValueError, match=r"of size 96 is not in .*: make it with `fedlens data"):
        DATASETS[NAME](Source(tmp_path))


def test_the_command_prepares_a_set_and_its_users_train(
    nature: Path, tmp_path: Path, fedlens: Callable[..., Ended]
) -> None:
    images_of(nature)[listing(NAME, nature).ids[3]].unlink()
    images = nature / "train_val_images"
    words = ["data", "prepare", NAME, "--from", str(nature), "--images", str(images)]
    status, out, _ = fedlens(*words, "--data", tmp_path, "--size", "8")
    assert status == 0
    assert out.splitlines()[0] == f"{NAME}: 199 + 10 images in {tmp_path / NAME}-8"
    assert out.splitlines()[1].startswith("left out: 1, listed in")
    assert json.loads((tmp_path / f"{NAME}-8" / "manifest.json").read_text())["num_left_out"] == 1
    described = fl.Experiment(
        dataset=fl.Named(NAME, {"size": 8}),
        model=fl.Named("linear"),
        rounds=2,
        clients=fl.Clients(per_round=4),
        engine="sequential",
    )
    assert described.clients.partition == fl.Named("natural", {"column": "user"})
    result = fl.run(described, data=tmp_path)
    assert result.status == "finished"
    assert all(bool(torch.isfinite(t).all()) for t in result.model.values())
