"""Data whose images may have several labels: read from files, given as tensors, and refused."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.config.options import call
from fedlens.core.federation import Federation, Fixed, Holdings
from fedlens.core.label_sets import MOST, unpacked
from fedlens.data import Source
from fedlens.data.csv_files import csv
from fedlens.data.numpy_files import npz
from tests.films import CORNERS, FINDINGS, SITES, write_films


def read(path, **options):
    return call(csv, Source(), options={"path": str(path), "multi_label": True, **options})


@pytest.mark.parametrize("between", [";", "|"])
def test_a_cell_of_a_csv_file_may_have_several_labels_or_none(tmp_path, between):
    file = write_films(tmp_path, between=between)
    dataset = read(file, channels=1)
    assert dataset.multi_label and dataset.classes == FINDINGS
    said = {}
    for line in file.read_text().splitlines()[1:]:
        name, cell, _ = line.split(",")
        said[name] = {*filter(None, map(str.strip, cell.split(between)))}
    assert set() in said.values() and max(map(len, said.values())) > 1
    images = [torch.cat([part.images for part in dataset.parts])]
    rows = torch.cat([part.wanted(slice(None), 3) for part in dataset.parts])
    assert len(images[0]) == len(rows) == len(said)
    counts = [sum(name in some for some in said.values()) for name in FINDINGS]
    assert rows.sum(0).tolist() == counts
    bright = torch.stack([images[0][:, 0, y + 3, x + 3] > 90 for y, x in CORNERS], 1)
    assert torch.equal(bright.long(), rows)  # each image has its own labels


def test_the_test_share_is_one_of_all_images_of_each_site(tmp_path):
    dataset = read(write_films(tmp_path), test_share=0.2)
    assert len(dataset.test) == 18
    assert sorted(np.unique(dataset.test.columns["client"])) == [*SITES]


def test_without_the_option_a_cell_is_one_class_and_a_line_says_so(tmp_path, caplog):
    (tmp_path / "p.csv").write_text("path,label\n0.png,a;b\n1.png,a\n2.png,a;b\n3.png,a\n")
    write_films(tmp_path, 4)
    with caplog.at_level(logging.WARNING):
        dataset = read(tmp_path / "p.csv", multi_label=False)
    assert dataset.classes == ("a", "a;b") and "multi_label = true" in caplog.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("path,label\n0.png,\n1.png, ; \n", "have 0 labels"),
        ("path,label\n0.png," + ";".join(map(str, range(MOST + 1))) + "\n1.png,1\n", "63 labels"),
        ("path,label,split\n0.png,a,train\n1.png,a;b,test\n", "'b', which train does not have"),
        ("path,label\n0.png,a\n,b\n", "path is empty"),
    ],
)
def test_bad_csv_files_are_refused_in_one_line(tmp_path, content, why):
    write_films(tmp_path, 2)
    (tmp_path / "p.csv").write_text(content)
    with pytest.raises(ValueError, match=why) as error:
        read(tmp_path / "p.csv")
    assert "\n" not in str(error.value)


def test_an_npz_file_may_have_rows_of_0_and_1(tmp_path):
    rows = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    images = np.zeros((4, 6, 6), np.uint8)
    save: Any = np.savez
    arrays = {"x_train": images, "x_test": images, "y_train": rows, "y_test": rows}
    save(tmp_path / "a.npz", **arrays)
    dataset = npz(Source(), path=str(tmp_path / "a.npz"))
    assert dataset.multi_label and dataset.num_classes == 3
    assert dataset.test.wanted(slice(None), 3).tolist() == rows.tolist()
    save(tmp_path / "b.npz", **{**arrays, "y_test": rows * 2})
    with pytest.raises(ValueError, match="rows of 0 and 1"):
        npz(Source(), path=str(tmp_path / "b.npz"))


IMAGES = torch.zeros(4, 1, 6, 6, dtype=torch.uint8)
ROWS = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 1]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.uint8])
def test_rows_of_0_and_1_are_kept_as_one_number_an_image(dtype):
    examples = fl.Examples(IMAGES, ROWS.to(dtype))
    assert examples.multi_label and examples.labels.tolist() == [1, 3, 0, 2]
    some = examples.take(torch.tensor([3, 1]))
    assert some.wanted(slice(None), 2).tolist() == [[0, 1], [1, 1]]
    assert some.to(torch.device("cpu")).multi_label


def test_counts_of_labels_and_of_examples_differ():
    examples = fl.Examples(IMAGES, ROWS)
    held = Holdings.of(
        [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([], dtype=torch.int64)]
    )
    federation = Federation(examples, 2, Fixed(held))
    assert federation.label_counts(held).tolist() == [[2, 1], [0, 1], [0, 0]]
    assert torch.equal(federation.labels, unpacked(examples.labels, 2))


@pytest.mark.parametrize(
    ("train", "test", "classes", "why"),
    [
        (ROWS, ROWS, ("a",), "give each a name"),
        (ROWS, torch.zeros(4).long(), ("a", "b"), "rows of 0 and 1 for all"),
        (ROWS * 2, ROWS, ("a", "b"), "rows of 0 and 1"),
        (torch.ones(4, 63), ROWS, ("a", "b"), "62 at most"),
        (ROWS, ROWS, tuple(map(str, range(70))), "62 at most"),
    ],
)
def test_labels_that_do_not_fit_are_refused(train, test, classes, why):
    with pytest.raises(ValueError, match=why):
        fl.Dataset("odd", fl.Examples(IMAGES, train), fl.Examples(IMAGES, test), classes)
