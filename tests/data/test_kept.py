"""Own photos are decoded once; the next run reads their pixels."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.data import DATASETS, Source, pictures
from fedlens.data.places import DECODED, cache
from fedlens.storage import kept as storage
from fedlens.storage.kept import kept


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Eight photos of noise, more than 4 MB together."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for i in range(8):
        place = tmp_path / "photos" / ("a", "b")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        noise = rng.integers(0, 256, (900, 1200, 3), dtype=np.uint8)
        Image.fromarray(noise).save(place / f"{i}.jpg", quality=90)
    return tmp_path / "photos"


@pytest.fixture
def decoded(monkeypatch):
    """The files that are decoded."""
    found, read = list[Path](), pictures.read

    def noted(path, *rest):
        found.append(path)
        return read(path, *rest)

    monkeypatch.setattr(pictures, "read", noted)
    return found


def load(photos: Path, **options):
    return DATASETS["folder"](Source(), path=str(photos), **{"size": 16, **options})


def test_photos_are_decoded_once(photos, decoded):
    first = load(photos)
    assert len(decoded) == 8 + 1  # the first of them tells the shape
    decoded.clear()
    again = load(photos)
    assert not decoded and again.digest == first.digest
    (place,) = (cache() / DECODED).iterdir()
    assert place.stat().st_mode & 0o077 == 0  # photos may be of patients
    assert load(photos, fit="crop").digest != first.digest and len(decoded) == 9


def test_a_photo_that_changed_is_decoded_again(photos, decoded):
    before, file = load(photos), photos / "a" / "0.jpg"
    stat = file.stat()
    content = bytearray(file.read_bytes())
    content[-2000:-1000] = content[-3000:-2000]
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of the same size and time
    decoded.clear()
    assert load(photos).digest != before.digest and decoded


def test_broken_photos_are_remembered_with_their_reasons(photos, decoded):
    (photos / "b" / "1.jpg").write_bytes(b"no image")
    first = load(photos, on_error="skip")
    decoded.clear()
    again = load(photos, on_error="skip")
    assert not decoded and again.left_out == first.left_out and len(first.left_out) == 1
    assert again.digest == first.digest
    with pytest.raises(ValueError, match=r"1\.jpg cannot be decoded"):
        load(photos)


def test_few_photos_leave_nothing_in_the_cache(photos, monkeypatch):
    monkeypatch.setattr(pictures, "WORTH", 2**30)
    load(photos)
    assert not cache().exists()


KILLED = """
import os, sys, signal
from fedlens.data import DATASETS, Source, pictures
def watch(done, total):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
DATASETS["folder"](Source(watch=watch), path=sys.argv[1], size=16)
"""


def test_decoding_that_was_killed_is_begun_again(photos, decoded):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(photos)], check=False)
    assert ended.returncode == -9
    assert load(photos).digest == load(photos).digest and len(decoded) == 9


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_bytes(b"\x93NUMPY spoilt")])
def test_a_folder_that_lacks_a_file_is_made_again(spoil, tmp_path):
    def make():
        made.append(1)
        return [np.arange(4), np.array([], str)]

    made, place = list[int](), tmp_path / "place"
    for times in (1, 1):
        numbers, texts = kept(place, ["numbers", "texts"], make)
        assert (len(made), numbers.tolist(), texts.tolist()) == (times, [0, 1, 2, 3], [])
    spoil(place / "numbers.npy")
    for _ in range(2):
        assert kept(place, ["numbers", "texts"], make)[0].tolist() == [0, 1, 2, 3]
    assert len(made) == 2


def test_what_was_not_used_for_longest_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MOST", 5_000)
    for i, name in enumerate("abc"):
        kept(tmp_path / name, ["x"], lambda: [np.zeros(2_000, np.uint8)])
        os.utime(tmp_path / name, (i, i))
        if name == "b":
            kept(tmp_path / "a", ["x"], list)  # is used
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "c"]
    kept(tmp_path / "large", ["x"], lambda: [np.zeros(9_000, np.uint8)])
    assert not (tmp_path / "large").exists()


def test_large_arrays_are_mapped_and_can_be_written_to_without_the_file(tmp_path):
    def make():
        return [np.zeros(2**21, np.uint8)]

    kept(tmp_path / "a", ["x"], make)
    (mapped,) = kept(tmp_path / "a", ["x"], make)
    assert isinstance(mapped, np.memmap)
    torch.from_numpy(mapped).fill_(7)
    assert not kept(tmp_path / "a", ["x"], make)[0].any()


def test_a_command_deletes_all_of_it(photos, fedlens):
    load(photos)
    assert "MB" in fedlens("data", "clean").out and not (cache() / DECODED).exists()
    assert fedlens("data", "clean").out == ""
