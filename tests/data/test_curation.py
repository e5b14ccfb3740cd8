"""The rules of Hsu et al. (2020) on small metadata of the published form."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.core.federation import Examples, Holdings, Pool
from fedlens.data.curation import drawn, frequent, listing
from fedlens.data.partitions import PARTITIONS
from tests.data.naturalists import make


@pytest.fixture(scope="module")
def nature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("nature"), {30: 105, 4: 100, 7: 99, 21: 130}, side=2)


def test_classes_of_a_hundred_images_are_balanced_and_tested_on_their_own(nature: Path) -> None:
    found = listing("inaturalist-user-120k", nature)
    assert found.classes == ["Avis 4", "Avis 21", "Avis 30"]
    assert found.num_train == 300
    assert np.bincount(found.labels[:300]).tolist() == [100] * 3
    assert np.bincount(found.labels[300:]).tolist() == [4] * 3
    assert len(set(found.ids)) == 312
    content = json.loads((nature / "train2017.json").read_text())
    files = {f"{row['id']:08x}": row["file_name"] for row in content["images"]}
    where = {r["id"]: r for r in json.loads((nature / "train2017_locations.json").read_text())}
    for i, name in enumerate(found.ids[:300]):
        assert found.classes[found.labels[i]].split()[1] in files[name]
        assert found.columns["user"][i] == str(where[int(name, 16)]["user_id"])
        assert found.columns["lat"][i] == where[int(name, 16)]["lat"]
    again = listing("inaturalist-user-120k", nature)
    assert again.ids == found.ids


def test_geographic_clients_are_those_of_the_s2_partition(nature: Path) -> None:
    whole = listing("inaturalist-user-120k", nature)
    geo = listing("inaturalist-geo-100", nature)
    assert geo.num_train == 300  # a cell of one image is large enough for n_max = 100
    columns = {name: column[:300] for name, column in whole.columns.items()}
    blank = Examples(torch.zeros(300, 1, 1, 1), torch.zeros(300, dtype=torch.int64), columns)
    held = PARTITIONS["s2"](Pool(blank, 1, 0, np.random.default_rng(0)), n_max=100)
    assert isinstance(held, Holdings) and held.names is not None
    expected = dict(zip(held.names, held.sizes.tolist(), strict=True))
    assert Counter(geo.columns["cell"][:300].tolist()) == expected
    coarse = listing("inaturalist-geo-3k", nature)
    assert min(Counter(coarse.columns["cell"][: coarse.num_train]).values()) >= 30
    assert set(coarse.ids) < set(whole.ids)


def test_published_files_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "federated_train_geo_3k.csv").write_text(
        "user_id,image_id,class\n89,aa,1\nNA,bb,0\n12,cc,0\n"
    )
    (tmp_path / "test.csv").write_text("image_id,class\ndd,2\n")
    found = listing("inaturalist-geo-3k", tmp_path)
    assert (found.ids, found.labels.tolist(), found.num_train) == (["aa", "cc", "dd"], [1, 0, 2], 2)
    assert found.columns["cell"].tolist() == ["89", "12", ""]
    assert found.classes == ["0", "1", "2"]


def naive(landmark: list[int], author: list[int], images: int, authors: int, landmarks: int):
    """The rules one at a time, image by image, until nothing changes."""
    kept = set(range(len(landmark)))
    while True:
        before = set(kept)
        for mine, other, least in ((landmark, author, authors), (author, landmark, landmarks)):
            for value in set(mine):
                members = [i for i in kept if mine[i] == value]
                if len(members) < images or len({other[i] for i in members}) < least:
                    kept -= set(members)
        if kept == before:
            return [i in kept for i in range(len(landmark))]


@settings(max_examples=150, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60),
    rules=st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)),
)
def test_the_filters_reach_their_fixed_point_in_any_order(pairs, rules) -> None:
    landmark, author = (np.array(values) for values in zip(*pairs, strict=True))
    images, authors, landmarks = rules
    found = frequent(landmark, author, images=images, authors=authors, landmarks=landmarks)
    assert found.tolist() == naive(landmark.tolist(), author.tolist(), *rules)


def landmarks(place: Path) -> Path:
    """Twelve authors with five images of each of six landmarks, and people with too few."""
    shots = [(f"l{m}", f"a{a}") for m in range(6) for a in range(12) for _ in range(5)]
    shots += [("l0", "visitor")] * 14 + [("l1", "visitor")] * 3  # too few: they become test
    shots += [("rare", f"a{a}") for a in range(12)]  # an image each: too few
    shots += [("l2", "")] * 2  # nobody knows who
    ids = [f"{i:016x}" for i in range(len(shots))]
    clean: dict[str, list[str]] = {}
    lines = ["id,url,author,license,title"]
    for name, (landmark, author) in zip(ids, shots, strict=True):
        clean.setdefault(landmark, []).append(name)
        lines.append(f'{name},http://x,{author},cc,"A, title"')
    (place / "train_attribution.csv").write_text("\n".join(lines))
    rows = [f"{landmark},{' '.join(images)}" for landmark, images in clean.items()]
    (place / "train_clean.csv").write_text("\n".join(["landmark_id,images", *rows]))
    return place


def test_landmarks_and_authors_have_enough_and_others_are_the_test(tmp_path: Path) -> None:
    found = listing("landmarks-user-160k", landmarks(tmp_path))
    assert found.classes == [f"l{m}" for m in range(6)]
    assert found.num_train == 360
    assert set(found.columns["user"][:360]) == {f"a{a}" for a in range(12)}
    assert set(found.columns["user"][360:]) == {"visitor"}
    assert Counter(found.labels[360:].tolist()) == {0: 10, 1: 3}
    assert len(set(found.ids)) == 373


def test_what_is_drawn_depends_on_the_names_alone() -> None:
    names = [f"{i}" for i in range(50)]
    assert drawn(names, 7) == drawn(names[::-1], 7)
    assert drawn(names[:3], 7) == drawn(names[2::-1], 7)
    assert len(set(drawn(names, 7))) == 7


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has neither a federated_train*.csv and a test.csv nor train2017.json"),
        (
            {"federated_train.csv": "user_id,image,class\n1,a,0\n"},
            "no column 'image_id'",
        ),
        ({"federated_train.csv": "user_id,image_id,class\n1,a\n"}, ":2: 2 cells under 3 columns"),
        ({"federated_train.csv": "user_id,image_id,class\n"}, "no rows"),
        ({"federated_train.csv": "user_id,image_id,class\n1,a,x\n"}, "class 'x' is not a whole"),
        (
            {"federated_train.csv": "user_id,image_id,class\n1,a,0\n2,a,0\n"},
            "the image 'a' is listed twice",
        ),
        (
            {"train2017.json": "{", "val2017.json": "{}", "train2017_locations.json": "[]"},
            "train2017.json cannot be read",
        ),
        (
            {"train2017.json": "{}", "val2017.json": "{}", "train2017_locations.json": "[]"},
            "is not an annotation file of iNaturalist (no 'images')",
        ),
    ],
)
def test_metadata_that_are_wrong_are_named(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    if "federated_train.csv" in files:
        (tmp_path / "test.csv").write_text("image_id,class\nz,0\n")
    with pytest.raises(ValueError) as refused:
        listing("inaturalist-user-120k", tmp_path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [("lat", 91), ("lon", -181.0), ("lat", "north")])
def test_coordinates_out_of_range_are_named(tmp_path: Path, key: str, value: object) -> None:
    make(tmp_path, {1: 100}, side=1)
    file = tmp_path / "train2017_locations.json"
    rows = json.loads(file.read_text())
    rows[4][key] = value
    file.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=rf"{key} of image 5 is {value!r}: write degrees"):
        listing("inaturalist-user-120k", tmp_path)
    rows[4][key] = None
    file.write_text(json.dumps(rows))
    assert listing("inaturalist-user-120k", tmp_path).num_train == 100
    assert listing("inaturalist-geo-100", tmp_path).num_train == 99


def test_a_set_that_is_not_prepared_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prepared"):
        listing("cifar10", tmp_path)
