"""Names of classes that several people wrote: what is one class, and what is said of others."""

import unicodedata

import pytest

from fedlens.data import DATASETS, Source
from fedlens.data.class_names import one_class_twice
from tests.data.test_layouts import write

LESION = "Läsion"


@pytest.fixture
def clinics(here):
    """Two sites, of which one has names as macOS writes them, and a space behind one."""
    write(here / "clinics", ("a",), (LESION, "normal"), count=5)
    write(here / "clinics", ("b",), (unicodedata.normalize("NFD", LESION), "normal "), count=5)
    return here


def test_a_class_is_one_however_its_letters_are_encoded(clinics):
    read = DATASETS["folder"]
    found = read(Source(), path="clinics", layout="site/class", channels=1)
    assert found.classes == (LESION, "normal")


def test_labels_of_a_csv_file_are_read_as_names_of_folders_are(clinics):
    rows = [
        f"{file.relative_to(clinics).as_posix()},{file.parent.name},{file.parts[-3]}"
        for file in sorted(clinics.rglob("*.png"))
    ]
    (clinics / "all.csv").write_text("\n".join(["path,label,client", *rows]), encoding="utf-8")
    found = DATASETS["csv"](Source(), path="all.csv", channels=1)
    assert found.classes == (LESION, "normal")


def test_import_and_the_run_of_what_it_wrote_have_the_same_classes(clinics, fedlens):
    assert "of 2 classes" in fedlens("import", "clinics").out
    ran = fedlens("run", "clinics.toml", "rounds=1", "model=linear", "engine=sequential")
    assert ran.status == 0 and f"2 classes ({LESION}, normal)" in ran.err


def test_names_that_differ_in_capitals_are_told_of(here, fedlens):
    write(here / "pets", ("a",), ("Cat", "dog"))
    write(here / "pets", ("b",), ("cat", "dog"))
    said = "Cat and cat are taken for two classes: give them one name if they are one"
    assert f"two names: {said}\n" in fedlens("import", "pets").out
    ran = fedlens("run", "pets.toml", "rounds=1", "model=linear", "engine=sequential", "-q")
    assert f"fedlens: pets: {said}\n" in ran.err


def test_letters_of_both_cases_may_be_classes():
    assert one_class_twice(["A", "a", "b"]) == []
