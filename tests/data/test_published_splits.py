"""The published splits of Hsu et al., as they are, and files of the same form."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.core.federation import Examples, Holdings, Pool
from fedlens.data import DATASETS, Source, curation
from fedlens.data.emd import emd
from fedlens.data.partitions import PARTITIONS
from fedlens.recipes.hsu2020.distributions import FIGURE3

DATA = os.environ.get("FEDLENS_DATA")
SPLITS = Path(DATA or "/nowhere") / "hsu2020-splits" / "cifar10"
real = pytest.mark.skipif(
    not SPLITS.is_dir(), reason="FEDLENS_DATA names no folder with hsu2020-splits/cifar10"
)
LANDMARKS = Path(DATA or "/nowhere") / "hsu2020-splits" / "landmarks-user-160k" / "test.csv"
ALPHAS = ["0.00", "0.05", "0.10", "0.50", "1.00", "100.00"]

LABELS = [3, 1, 4, 1, 5]
ROWS = "user_id,image_id,class\n10,0,3\n9,1,1\n10,4,5\n9,3,1\n"


def examples(**columns: Any) -> Examples:
    return Examples(torch.zeros(5, 1, 1, 1, dtype=torch.uint8), torch.tensor(LABELS), columns)


def split(path: Path, given: Examples) -> Holdings:
    held = PARTITIONS["published"](Pool(given, 10, 0, np.random.default_rng(0)), path=str(path))
    assert isinstance(held, Holdings)
    return held


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_a_published_split_is_taken_as_it_is(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"split{ending}"
    file.write_bytes(gzip.compress(ROWS.encode()) if ending.endswith("gz") else ROWS.encode())
    held = split(file, examples())
    assert held.names == ("9", "10")
    assert [held.members(client).tolist() for client in range(2)] == [[1, 3], [0, 4]]


def test_images_may_be_named_and_columns_may_stand_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "split.csv"
    file.write_text("class,label,image_id,user_id\n1,bee,b7,zoe\n3,ant,a1,ann\n")
    held = split(file, examples(image_id=np.array(["a1", "x", "y", "b7", "z"])))
    assert held.names == ("ann", "zoe")
    assert held.index.tolist() == [0, 3]


def test_its_path_is_relative_to_the_experiment(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "split.csv").write_text(ROWS)
    (tmp_path / "sub" / "a.toml").write_text(
        'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 1\n'
        '[clients]\npartition = { name = "published", path = "split.csv" }\n'
    )
    monkeypatch.chdir(tmp_path)
    named = fl.Experiment.read("sub/a.toml").clients.partition
    assert named.options["path"] == str(tmp_path / "sub" / "split.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ROWS.replace("9,1,1", "9,1,2"), ":3: image '1' is of class 2, but the data say 1: use"),
        (ROWS.replace("9,1,1", "9,7,1"), ":3: there is no image '7' among the 5 training"),
        (ROWS.replace("9,3,1", "9,1,1"), ":5: image '1' is listed twice"),
        (ROWS.replace("9,3,1", "9,3"), ":5: 2 cells under 3 columns"),
        (ROWS.replace("user_id", "user"), ":1: no column 'user_id' among user, image_id, class"),
        ("", "is empty: begin it with the header user_id,image_id,class"),
        ("user_id,image_id,class\n", "no rows"),
        ("\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "split.csv"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError) as refused:
        split(file, examples())
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_missing_or_cut_short_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(ROWS.encode())[:-9])
    for file in (tmp_path / "none.csv", cut):
        with pytest.raises(ValueError, match=r"cannot be read .*set path to a csv"):
            split(file, examples())


@real
@pytest.mark.parametrize("alpha", ALPHAS)
def test_ours_is_as_skewed_as_the_published_split_of_every_alpha(alpha: str) -> None:
    train = DATASETS["cifar10"](Source(Path(str(DATA)))).train
    theirs = split(SPLITS / f"federated_train_alpha_{alpha}.csv.gz", train)
    assert theirs.sizes.tolist() == [500] * 100
    distance = emd(theirs.label_counts(train.labels, 10))
    ours = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        held = PARTITIONS["dirichlet"](Pool(train, 10, 100, rng), alpha=float(alpha))
        assert isinstance(held, Holdings)
        ours.append(emd(held.label_counts(train.labels, 10)))
    mean = np.mean(ours)
    assert abs(mean - distance) < 0.06


@pytest.mark.skipif(
    not LANDMARKS.is_file(),
    reason="FEDLENS_DATA names no folder with hsu2020-splits/landmarks-user-160k/test.csv",
)
def test_the_published_test_images_of_landmarks_are_as_many_as_the_paper_says(
    tmp_path: Path,
) -> None:
    users = tmp_path / "federated_train.csv"
    users.write_text("user_id,image_id,class\n0,none,0\n")  # its training images are not needed
    found = curation.from_split_files(users, LANDMARKS, "user")
    counts = np.bincount(found.labels[found.num_train :])
    assert counts.sum() == FIGURE3["test images"]
    assert (counts == 10).sum() == FIGURE3["classes with exactly 10 test images"]
