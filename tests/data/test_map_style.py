"""Data sets of torchvision's kind, and those of Hugging Face's datasets on disk."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedlens as fl
from fedlens.data import Source, hugging_face
from tests.data.test_own_files import load
from tests.later import Later

datasets = Later("datasets")


class Pairs:
    """A data set of torchvision's kind: red squares whose brightness is their position."""

    classes = ("cat", "dog")

    def __init__(self, count: int, kind: str = "RGB", side: int = 4) -> None:
        self.count, self.kind, self.side = count, kind, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int):
        if not 0 <= i < self.count:
            raise IndexError
        if self.kind == "bytes":
            return torch.full((3, self.side, self.side), i, dtype=torch.uint8), torch.tensor(i % 2)
        if self.kind == "floats":
            return torch.full((3, self.side, self.side), i / 7), np.int64(i % 2)
        color = (i, 0, 0) if self.kind == "RGB" else i
        return Image.new(self.kind, (self.side, self.side), color), i % 2


def test_pairs_become_the_examples_they_say():
    found = fl.map_style(Pairs(6), Pairs(3), name="squares")
    assert (found.name, found.classes, found.shape) == ("squares", ("cat", "dog"), (3, 4, 4))
    assert found.train.images[:, 0, 2, 2].tolist() == [*range(6)]
    assert found.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert found.test.labels.tolist() == [0, 1, 0]
    assert found.mean is not None
    assert found.mean[0] == pytest.approx(2.5 / 255)
    assert found.train.images.permute(0, 2, 3, 1).is_contiguous()  # as all images lie


def test_without_a_test_set_a_share_of_each_class_is_test():
    found = fl.map_style(Pairs(40), test_share=0.25)
    assert (len(found.train), len(found.test)) == (30, 10)
    assert found.test.labels.sum() == 5
    both = torch.cat([found.train.images, found.test.images])[:, 0, 0, 0]
    assert sorted(both.tolist()) == [*range(40)]


def test_whoever_watches_is_told_how_many_are_read_of_train_and_test():
    told = []
    fl.map_style(Pairs(6), Pairs(3), watch=lambda *counts: told.append(counts))
    assert told == [(done, 9) for done in range(1, 10)]


def test_gray_stays_gray_and_tensors_are_taken_as_bytes_or_as_floats():
    assert fl.map_style(Pairs(4, "L"), Pairs(4, "L")).shape == (1, 4, 4)
    assert fl.map_style(Pairs(4, "L"), Pairs(4, "L"), channels=3).shape == (3, 4, 4)
    found = fl.map_style(Pairs(4, "bytes"), Pairs(4, "bytes"), size=8)
    assert found.shape == (3, 8, 8)
    assert found.train.images[:, 1, 5, 5].tolist() == [0, 1, 2, 3]
    floats = fl.map_style(Pairs(4, "floats"), Pairs(4, "floats"))
    assert floats.mean is None
    assert floats.train.images[3, 0, 0, 0] == pytest.approx(3 / 7)


@pytest.mark.parametrize(
    ("train", "options", "line"),
    [
        (Pairs(0), {}, "train has no items"),
        (Pairs(4), {"size": 0}, "size is 0"),
        ([(1, 2)], {}, "item 0 of train cannot be read .*not an image"),
        ([Image.new("L", (2, 2))], {}, "item 0 of train cannot be read"),
        ([(Image.new("L", (2, 2)), "cat")], {}, "item 0 of train cannot be read"),
        ([(Image.new("L", (2, 2)), -1)], {}, "item 0 of train has the label -1"),
        (Pairs(4, "floats"), {"size": 8}, "floats are used as they are"),
        (
            [(Image.new("L", (2, 2)), 0), (Image.new("L", (3, 2)), 0)],
            {},
            "item 1 of train is 1×2×3 bytes, but the first is 1×2×2 bytes: set size",
        ),
    ],
)
def test_what_cannot_be_read_is_named(train, options, line):
    with pytest.raises(ValueError, match=line):
        fl.map_style(train, Pairs(2), **options)


def test_a_function_named_in_an_experiment_may_give_such_data_sets(tmp_path, monkeypatch):
    (tmp_path / "squares_here.py").write_text(
        "from tests.data.test_map_style import Pairs\n"
        "def both(source, *, side: int = 4):\n"
        "    return Pairs(8, side=side), Pairs(4, side=side)\n"
        "def one(source):\n"
        "    return Pairs(40)\n"
        "def wrong(source):\n"
        "    return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    table = {"name": "squares_here:both", "side": 6}
    clients = fl.Clients(count=2)
    run = fl.Experiment(dataset=table, model="linear", rounds=1, clients=clients)
    assert fl.run(run).status == "finished"
    one = fl.Experiment(dataset="squares_here:one", model="linear", rounds=1, clients=clients)
    assert fl.run(one).status == "finished"
    with pytest.raises(ValueError, match="gave int"):
        fl.run(fl.Experiment(dataset="squares_here:wrong", model="linear", rounds=1))


def rows(count: int, **columns):
    """A data set of Hugging Face: gray squares, their classes, and other columns."""
    kinds = {
        "picture": datasets.Image(),
        "animal": datasets.ClassLabel(names=["cat", "dog"]),
        "client": datasets.Value("string"),
    }
    content = {
        "picture": [Image.new("L", (4, 4), i) for i in range(count)],
        "animal": [i % 2 for i in range(count)],
        "client": [f"site{i % 3}" for i in range(count)],
    }
    content |= columns
    features = datasets.Features(
        {name: kinds.get(name, datasets.Value("int64")) for name in content}
    )
    return datasets.Dataset.from_dict(content, features=features)


def test_a_saved_data_set_of_hugging_face_is_read_with_its_columns(tmp_path):
    both = datasets.DatasetDict({"train": rows(12), "validation": rows(6)})
    both.save_to_disk(tmp_path / "pets")
    told = []
    source = Source(base=tmp_path, watch=lambda *counts: told.append(counts))
    found = hugging_face.hugging_face(source, path="pets")
    assert told == [(done, 18) for done in range(1, 19)]
    assert (found.name, found.classes, found.shape) == ("pets", ("cat", "dog"), (1, 4, 4))
    assert found.train.images[:, 0, 1, 1].tolist() == [*range(12)]
    assert found.train.labels.tolist() == [0, 1] * 6
    assert found.test.columns["client"].tolist() == ["site0", "site1", "site2"] * 2


def test_its_column_client_names_the_clients(tmp_path):
    rows(60).save_to_disk(tmp_path / "pets")
    run = fl.run(
        fl.Experiment(
            dataset={"name": "hugging-face", "path": str(tmp_path / "pets")},
            model="linear",
            rounds=1,
        ),
        tmp_path / "run",
    )
    assert run.status == "finished"
    assert '"site2"' in (tmp_path / "run" / "partition.json").read_text()
    assert not hugging_face.names_clients(tmp_path)


def test_a_split_for_validation_beside_test_is_the_part_validation(tmp_path, caplog):
    splits = {"training": rows(12), "val": rows(6), "test": rows(4)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "pets")
    found = load("hugging-face", tmp_path, path="pets")
    assert found.validation is not None
    assert [len(part) for part in found.parts] == [12, 4, 6]
    assert found.validation.columns["client"].tolist()[:3] == ["site0", "site1", "site2"]
    assert "pets has 6 images for validation: they are neither trained nor tested" in caplog.text
    assert hugging_face.names_clients(tmp_path / "pets")
    run = fl.run(
        fl.Experiment(
            dataset={"name": "hugging-face", "path": str(tmp_path / "pets")},
            model="linear",
            rounds=1,
            evaluate=fl.Evaluate(on=("test", "validation")),
        )
    )
    assert {"test_accuracy", "validation_accuracy"} <= set(run.final)

    datasets.DatasetDict(splits | {"dev": rows(2)}).save_to_disk(tmp_path / "twice")
    with pytest.raises(ValueError, match="val and dev"):
        load("hugging-face", tmp_path, path="twice")


def test_of_another_column_each_client_gives_its_share_too(tmp_path):
    rows(60, camera=[i % 10 == 0 for i in range(60)]).save_to_disk(tmp_path / "pets")
    found = load("hugging-face", tmp_path, path="pets", client="camera")
    assert np.bincount(found.test.columns["camera"]).tolist() == [11, 1]
    with pytest.raises(ValueError, match="lens"):
        load("hugging-face", tmp_path, path="pets", client="lens")


def test_no_file_and_no_address_is_opened_that_stands_in_the_place_of_an_image(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "elsewhere.png")
    row = {"picture": {"bytes": None, "path": str(tmp_path / "elsewhere.png")}}
    with pytest.raises(ValueError, match="bytes"):
        hugging_face.stored_bytes(row["picture"])


def test_labels_may_be_numbers_or_texts(tmp_path):
    plain = rows(20).remove_columns("animal")
    plain.add_column("label", [i % 4 for i in range(20)]).save_to_disk(tmp_path / "numbers")
    assert load("hugging-face", tmp_path, path="numbers").classes == ("0", "1", "2", "3")
    texts = [["owl", "ant"][i % 2] for i in range(20)]
    plain.add_column("what", texts).save_to_disk(tmp_path / "texts")
    found = load("hugging-face", tmp_path, path="texts", label="what")
    assert found.classes == ("ant", "owl")
    numbers = found.train.images[:, 0, 0, 0] % 2
    assert torch.equal(found.train.labels, 1 - numbers.long())


def test_what_a_saved_data_set_lacks_is_said_with_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="save_to_disk"):
        load("hugging-face", tmp_path, path="nowhere")
    datasets.DatasetDict({"all": rows(4)}).save_to_disk(tmp_path / "all")
    with pytest.raises(ValueError, match="call one of them train"):
        load("hugging-face", tmp_path, path="all")
    rows(4).remove_columns("animal").save_to_disk(tmp_path / "unlabelled")
    with pytest.raises(ValueError, match="label"):
        load("hugging-face", tmp_path, path="unlabelled")
    rows(4).remove_columns("picture").save_to_disk(tmp_path / "blind")
    with pytest.raises(ValueError, match=r"datasets\.Image"):
        load("hugging-face", tmp_path, path="blind")
    rows(4, animal=[0, 1, -1, 0]).save_to_disk(tmp_path / "some")
    with pytest.raises(ValueError, match="every row"):
        load("hugging-face", tmp_path, path="some")
    with pytest.raises(ValueError, match="picture"):
        load("hugging-face", tmp_path, path="some", image="client")
    unlike = datasets.DatasetDict({"train": rows(4), "test": rows(4).remove_columns("client")})
    unlike.save_to_disk(tmp_path / "unlike")
    with pytest.raises(ValueError, match=r"cannot be read .*client"):
        load("hugging-face", tmp_path, path="unlike")
    arrow = next(Path(tmp_path / "some").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        load("hugging-face", tmp_path, path="some")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'pip install "fedlens\[hugging-face\]"'):
        load("hugging-face", tmp_path, path="all")
