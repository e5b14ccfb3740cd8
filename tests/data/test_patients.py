"""Images of one patient are on one side of train, validation and test."""

import numpy as np
import pytest
import torch
from PIL import Image

import fedlens as fl
from fedlens.core.federation import Holdings
from fedlens.setup import build
from fedlens.setup.data import divided, with_validation


@pytest.fixture
def photos(tmp_path):
    """20 patients of a site each, with one to three photos, of one class or of two."""
    rng, rows = np.random.default_rng(0), ["path,label,client,patient"]
    for who in range(40):
        site = ("north", "south")[who % 2]
        for number in range(rng.integers(1, 4)):
            label = ("benign", "malignant")[int(rng.integers(2))]
            place = tmp_path / "photos" / site / label
            place.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (16, 16), np.uint8)
            Image.fromarray(pixels).save(place / f"p{who:02}_{number}.png")
            rows.append(f"photos/{site}/{label}/p{who:02}_{number}.png,{label},{site},p{who:02}")
    (tmp_path / "photos.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def described(photos, **changes):
    dataset = {"name": "csv", "path": str(photos / "photos.csv"), "channels": 1}
    plain = {"dataset": dataset, "model": "linear", "rounds": 1, "engine": "sequential"}
    return fl.Experiment.of(plain | changes)


def patients(part):
    return set(part.columns["patient"].tolist())


def test_no_patient_is_on_two_sides(photos):
    asked = described(photos, evaluate={"on": ["test", "validation"], "validation": 0.2})
    dataset = build(asked).dataset
    train, validation = with_validation(dataset, asked)
    assert validation is not None
    sides = [patients(part) for part in (train, validation, dataset.test)]
    assert all(sides) and sum(map(len, sides)) == 40
    count = len(train) + len(validation)
    assert abs(len(validation) - 0.2 * count) <= 3


def test_no_patient_is_on_two_sides_of_a_client(photos):
    setup = build(described(photos, clients={"holdout": 0.3}))
    held = setup.federation.everyone(0)
    assert setup.client_tests is not None
    for client in range(2):
        whose = setup.federation.examples.columns["patient"]
        kept = set(whose[held.members(client).numpy()].tolist())
        tested = set(whose[setup.client_tests.holdings.members(client).numpy()].tolist())
        assert kept and tested and not kept & tested


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_patients_of_one_image_are_divided_as_images_are(share):
    everyone = Holdings.of([torch.arange(30), torch.arange(30, 37)])
    clients = torch.arange(2)
    for a, b in zip(
        divided(everyone, share, 7, clients),
        divided(everyone, share, 7, clients, torch.arange(37).flip(0)),
        strict=True,
    ):
        assert torch.equal(a.index, b.index) and torch.equal(a.offsets, b.offsets)


def test_a_client_with_one_patient_tests_none():
    everyone = Holdings.of([torch.arange(10)])
    kept, tested = divided(everyone, 0.3, 0, torch.tensor([0]), torch.zeros(10, dtype=torch.int64))
    assert (len(kept.index), len(tested.index)) == (10, 0)


def test_an_image_whose_patient_is_not_known_is_one_of_its_own():
    images, labels = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    named = fl.Examples(images, labels, {"patient": np.array(["a", "", "a", ""])})
    assert len(named.patients.unique()) == 3 and named.patients[0] == named.patients[2]
    assert len(fl.Examples(images, labels).patients.unique()) == 4


def test_a_patient_in_two_parts_of_a_csv_is_refused(photos):
    file = photos / "photos.csv"
    rows = file.read_text().splitlines()
    first = next(i for i, row in enumerate(rows) if row.endswith(rows[i + 1][-3:]))
    split = ["test" if i % 3 == 0 else "train" for i in range(len(rows))]
    split[first], split[first + 1] = "train", "test"
    lines = [f"{rows[0]},split", *(f"{row},{split[i]}" for i, row in enumerate(rows) if i)]
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="patient"):
        build(described(photos))


def test_import_warns_of_names_like_several_photos_of_one_and_takes_a_pattern(
    photos, fedlens, monkeypatch
):
    monkeypatch.chdir(photos)
    ended = fedlens("import", "photos", "--overwrite")
    assert "look like photos of one" in ended.out and "--patient '(.*[0-9].*)[-_ ]'" in ended.out
    ended = fedlens("import", "photos", "--overwrite", "--patient", "(.*[0-9].*)[-_ ]")
    assert ended.status == 0 and "found 40 patients" in ended.out
    assert "look like" not in ended.out
    setup = build(fl.Experiment.read(photos / "photos.toml"))
    assert not patients(setup.federation.examples) & patients(setup.dataset.test)
    for pattern, word in (("(", "expression"), ("p", "groups"), ("(x)", "matches no file")):
        refused = fedlens("import", "photos", "--overwrite", "--patient", pattern)
        assert refused.status == 2 and word in refused.err
