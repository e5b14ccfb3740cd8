import gzip
import io
import os
import pickle
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import fedlens as fl
from fedlens.data import DATASETS, Source, published
from fedlens.data.fetch import check, get_from, named_sets
from fedlens.data.places import cache, roots
from fedlens.data.published import PUBLISHED
from fedlens.storage import free_memory
from fedlens.storage.reading import BadFile
from tests.data.published_files import (
    idx_bytes,
    labels,
    pixels,
    python2_pickle,
    write_cifar10,
    write_cifar100,
    write_idx_set,
)

REAL = os.environ.get("FEDLENS_DATA")  # read before the tests hide it


def is_channels_last(images: torch.Tensor) -> bool:
    return images.permute(0, 2, 3, 1).is_contiguous()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("folder", ["fashion-mnist", "FashionMNIST/raw", "."])
def test_fashion_mnist_loads_from_every_known_folder(tmp_path, folder, zipped):
    write_idx_set(tmp_path / folder, zipped=zipped)
    found = DATASETS["fashion-mnist"](Source(data=tmp_path))
    assert found.shape == (1, 28, 28)
    assert (len(found.train), len(found.test)) == (20, 10)
    assert (found.train.images[:, 0].numpy() == pixels(20, 28, 28, seed=20)).all()
    assert found.test.labels.tolist() == list(range(10))
    assert found.classes[9] == "Ankle boot"
    assert (found.mean, found.std) == ((0.2860,), (0.3530,))
    assert is_channels_last(found.train.images)


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_mnist_loads_from_every_known_folder(tmp_path, folder):
    write_idx_set(tmp_path / folder, zipped=True)
    found = DATASETS["mnist"](Source(data=tmp_path))
    assert (found.name, found.classes) == ("mnist", tuple("0123456789"))


@pytest.mark.parametrize(("folder", "binary"), [("batches-py", False), ("batches-bin", True)])
def test_cifar10_loads_in_both_forms(tmp_path, folder, binary):
    write_cifar10(tmp_path / f"cifar-10-{folder}", binary=binary)
    found = DATASETS["cifar10"](Source(data=tmp_path))
    assert found.shape == (3, 32, 32)
    planes = np.tile(pixels(4, 3072, seed=4).reshape(4, 3, 32, 32), (5, 1, 1, 1))
    assert (found.train.images.numpy() == planes).all()
    assert found.train.labels.tolist() == [0, 1, 2, 3] * 5
    assert found.test.labels.tolist() == list(range(10))
    assert is_channels_last(found.train.images)
    assert found.train.columns == {}


@pytest.mark.parametrize(("folder", "binary"), [("python", False), ("binary", True)])
@pytest.mark.parametrize("kind", ["fine", "coarse"])
def test_cifar100_loads_in_both_forms_with_both_labels(tmp_path, folder, binary, kind):
    write_cifar100(tmp_path / f"cifar-100-{folder}", binary=binary)
    found = DATASETS["cifar100"](Source(data=tmp_path), labels=kind)
    assert found.num_classes == {"fine": 100, "coarse": 20}[kind]
    assert (found.train.labels.numpy() == found.train.columns[kind]).all()
    assert set(found.train.columns) == {"coarse", "fine"}
    assert (found.test.images.numpy().reshape(10, 3072) == pixels(10, 3072, seed=10)).all()


def test_cifar100_tells_its_fine_labels_from_its_coarse_ones(tmp_path):
    batch = {b"data": pixels(2, 3072), b"coarse_labels": [4, 19], b"fine_labels": [0, 99]}
    for name in ("train", "test", "meta"):
        (tmp_path / name).write_bytes(python2_pickle(batch))
    found = {k: DATASETS["cifar100"](Source(data=tmp_path), labels=k) for k in ("fine", "coarse")}
    assert found["fine"].train.labels.tolist() == [0, 99]
    assert found["coarse"].train.labels.tolist() == [4, 19]
    entry = PUBLISHED["cifar100"]
    assert (entry.classes[0], entry.classes[99]) == ("apple", "worm")
    coarse = entry.coarse_classes
    assert (coarse[4], coarse[19]) == ("fruit_and_vegetables", "vehicles_2")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_an_idx_file_of_any_shape_comes_back_as_it_was(tmp_path_factory, shape):
    array = pixels(*shape)
    file = tmp_path_factory.mktemp("idx") / "some-idx.gz"
    file.write_bytes(gzip.compress(idx_bytes(array)))
    assert (published.read_idx(file, len(shape)) == array).all()


WHOLE = idx_bytes(labels(7))
BROKEN = {
    "empty": b"",
    "cut in the header": WHOLE[:6],
    "cut in the content": WHOLE[:-1],
    "longer than announced": WHOLE + b"\0",
    "of another type": b"\0\0\x0d" + WHOLE[3:],
    "of other dimensions": idx_bytes(pixels(7, 1)),
    "without examples": struct.pack(">BBBBI", 0, 0, 8, 1, 0),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_broken_idx_file_is_named(tmp_path, how, ending):
    content = gzip.compress(BROKEN[how]) if ending else BROKEN[how]
    file = tmp_path / f"labels{ending}"
    file.write_bytes(content)
    with pytest.raises(BadFile, match=f"labels{ending} cannot be read"):
        published.read_idx(file, 1)


@pytest.mark.parametrize("damage", [lambda c: c[:-20], lambda c: c[:30] + b"?" * 9 + c[39:]])
def test_a_damaged_gzip_is_named_with_the_remedy(tmp_path, damage):
    write_idx_set(tmp_path, zipped=True)
    file = tmp_path / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"t10k-images.*damaged.*fedlens data get fashion-mnist`"):
        DATASETS["fashion-mnist"](Source(data=tmp_path))


def test_labels_that_do_not_match_the_images_are_noticed(tmp_path):
    write_idx_set(tmp_path, zipped=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels(19)))
    with pytest.raises(ValueError, match="19"):
        DATASETS["mnist"](Source(data=tmp_path))


def test_files_of_the_other_mnist_are_not_taken_for_ones_own(tmp_path):
    write_idx_set(tmp_path, zipped=True)
    file = tmp_path / "t10k-labels-idx1-ubyte.gz"
    first = np.array(PUBLISHED["fashion-mnist"].first_test_labels, np.uint8)
    file.write_bytes(gzip.compress(idx_bytes(first)))
    assert DATASETS["fashion-mnist"](Source(data=tmp_path)).test.labels.tolist() == first.tolist()
    with pytest.raises(ValueError, match="mnist is not in"):
        DATASETS["mnist"](Source(data=tmp_path))
    assert PUBLISHED["mnist"].first_test_labels != PUBLISHED["fashion-mnist"].first_test_labels


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_before_it_runs(tmp_path, protocol):
    write_cifar10(tmp_path / "cifar-10-batches-py", binary=False)
    file, mark = tmp_path / "cifar-10-batches-py" / "data_batch_3", tmp_path / "mark"
    file.write_bytes(pickle.dumps(Malicious(os.mkdir, str(mark)), protocol=protocol))
    with pytest.raises(ValueError, match="data_batch_3 is damaged"):
        DATASETS["cifar10"](Source(data=tmp_path))
    assert not mark.exists()


@pytest.mark.parametrize("function", [eval, getattr, np.load, np.frombuffer, np.array])
def test_no_function_is_reached_through_a_pickle(tmp_path, function):
    file = tmp_path / "batch"
    file.write_bytes(pickle.dumps({b"data": Malicious(function, "1"), b"labels": []}, protocol=2))
    with pytest.raises(BadFile, match="CIFAR"):
        published.read_pickle(file, ["labels"])


BAD_BATCHES = {
    "no labels": {b"data": pixels(2, 3072)},
    "too few labels": {b"data": pixels(2, 3072), b"labels": [1]},
    "labels that are text": {b"data": pixels(2, 3072), b"labels": [b"a", b"b"]},
    "pixels of another size": {b"data": pixels(2, 3071), b"labels": [1, 2]},
    "pixels that are floats": {b"data": np.zeros((2, 3072)), b"labels": [1, 2]},
    "objects for pixels": {b"data": np.array([None, None]), b"labels": [1, 2]},
    "no pixels": {b"data": pixels(0, 3072), b"labels": []},
    "a list": [1, 2],
}


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_pickle_of_something_else_is_named(tmp_path, what):
    (tmp_path / "batch").write_bytes(python2_pickle(BAD_BATCHES[what]))
    with pytest.raises(BadFile, match="cannot be read"):
        published.read_pickle(tmp_path / "batch", ["labels"])


@pytest.mark.parametrize("binary", [True, False])
def test_a_truncated_cifar_file_is_named_with_the_remedy(tmp_path, binary):
    write_cifar10(tmp_path, binary=binary)
    file = tmp_path / ("test_batch.bin" if binary else "test_batch")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"test_batch.*damaged.*fedlens data get cifar10`"):
        DATASETS["cifar10"](Source(data=tmp_path))


def test_places_are_searched_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "variable"))
    source = Source(data=tmp_path / "option")
    places = [tmp_path / "option", tmp_path / "variable", cache()]
    assert roots(source) == places
    for count, place in enumerate(places, start=1):
        write_idx_set(place / "mnist", zipped=True, train=count)
    for count, place in enumerate(places, start=1):
        assert len(DATASETS["mnist"](source).train) == count
        shutil.rmtree(place)


def test_the_cache_is_in_the_home_folder_unless_moved(monkeypatch, tmp_path):
    assert cache() == Path(os.environ["XDG_CACHE_HOME"]) / "fedlens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache() == tmp_path / ".cache" / "fedlens"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_missing_set_says_where_it_was_looked_for_and_how_to_get_it(tmp_path, name):
    with pytest.raises(ValueError) as caught:
        DATASETS[name](Source(data=tmp_path))
    for part in (str(tmp_path), str(cache()), f"fedlens data get {name}", "--from", "FEDLENS_DATA"):
        assert part in str(caught.value)


def test_a_set_that_lacks_a_file_says_which(tmp_path):
    write_cifar100(tmp_path / "cifar-100-python", binary=False)
    (tmp_path / "cifar-100-python" / "test").unlink()
    with pytest.raises(ValueError, match="incomplete"):
        DATASETS["cifar100"](Source(data=tmp_path))
    write_cifar100(cache() / "cifar-100-binary", binary=True)
    assert len(DATASETS["cifar100"](Source(data=tmp_path)).test) == 10


@pytest.mark.skipif(not REAL, reason="set FEDLENS_DATA to a folder with the real sets")
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_set_loads_whole_and_has_its_checksums(name, monkeypatch):
    monkeypatch.setenv("FEDLENS_DATA", str(REAL))
    if {row.name: row.where for row in named_sets(Source())}[name] is None:
        pytest.skip(f"FEDLENS_DATA has no {name}")
    entry, found = PUBLISHED[name], DATASETS[name](Source())
    assert (len(found.train), len(found.test)) == (entry.num_train, entry.num_test)
    assert found.shape == (len(entry.mean), entry.side, entry.side)
    assert len(set(found.train.labels.unique().tolist())) == found.num_classes
    if entry.first_test_labels:
        assert tuple(found.test.labels[:10].tolist()) == entry.first_test_labels
    assert {state for _, state in check(name, Source())} <= {"ok", "readable"}


def test_the_files_of_mnist_are_taken_from_an_archive_as_they_are_without_gzip(tmp_path):
    images = {"train": 60_000, "t10k": 10_000}
    with tarfile.open(tmp_path / "mnist.tar.gz", "w:gz", compresslevel=1) as tar:
        for part, count in images.items():
            for name, array in (
                (f"{part}-images-idx3-ubyte", np.zeros((count, 28, 28), np.uint8)),
                (f"{part}-labels-idx1-ubyte", np.zeros(count, np.uint8)),
            ):
                content = idx_bytes(array)
                about = tarfile.TarInfo(f"MNIST/raw/{name}")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))
    get_from("mnist", tmp_path / "mnist.tar.gz", tmp_path / "dest")
    assert len(DATASETS["mnist"](Source(data=tmp_path / "dest")).train) == 60_000


@pytest.mark.parametrize("size", [16, 50])
def test_a_set_is_resized_as_pillow_does_it(size):
    as_published = DATASETS["fashion-mnist-mini"](Source())
    found = DATASETS["fashion-mnist-mini"](Source(), size=size)
    assert found.shape == (1, size, size)
    assert found.train.images.is_contiguous(memory_format=torch.channels_last)
    for k in (0, 5_999):
        picture = Image.fromarray(as_published.train.images[k, 0].numpy())
        expected = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR), int)
        assert np.abs(found.train.images[k, 0].numpy() - expected).max() <= 1


def test_a_size_that_is_none_or_too_large_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="size is 0"):
        fl.Experiment({"name": "fashion-mnist-mini", "size": 0}, "linear", rounds=1)
    monkeypatch.setattr(free_memory, "available", lambda: 1000)
    with pytest.raises(ValueError, match="smaller size"):
        DATASETS["fashion-mnist-mini"](Source(), size=224)
