"""What folders stand for, to `fedlens import` and to the data set `folder` alike."""

import csv
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

import fedlens as fl
from fedlens.data import DATASETS, Source
from fedlens.data.layouts import images
from fedlens.data.survey import survey
from fedlens.setup import build, partition

CLASSES = ("bag", "boot")


def write(place: Path, *levels: tuple[str, ...], count: int = 2) -> Path:
    """place/a/b/0.png, ... for each a of the first level, b of the second; no two are alike."""
    for names in product(*levels):
        inside = place.joinpath(*names)
        inside.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            seed = sum(map(ord, "".join(names))) + 7 * number
            image = Image.new("RGB", (4, 4), (seed % 251, seed % 83, number))
            image.save(inside / f"{number}.png")
    return place


def folder(place: Path, **options) -> fl.Dataset:
    found = DATASETS["folder"](Source(), path=str(place), **options)
    assert isinstance(found, fl.Dataset)
    return found


def imported(place: Path, fedlens, *words: str) -> fl.Dataset:
    """What a run would read after `fedlens import`."""
    ended = fedlens("import", place, "--out", "x.toml", "--overwrite", "-q", *words)
    assert ended.status == 0, ended.err
    found = fl.Experiment.read(Path("x.toml")).dataset
    assert isinstance(found, fl.Named)
    read = DATASETS["csv"](Source(), **found.options)
    assert isinstance(read, fl.Dataset)
    return read


@pytest.mark.parametrize(
    ("train", "test"),
    [
        *[("train", "test"), ("Train", "Test"), ("TRAIN", "TEST"), ("training", "testing")],
        *[("train", test) for test in ("val", "valid", "Validation", "dev", "eval")],
    ],
)
def test_parts_are_known_in_usual_spellings_to_import_and_folder(here, fedlens, train, test):
    write(here / "photos" / train, CLASSES, count=3)
    write(here / "photos" / test, CLASSES, count=1)
    for found in (folder(here / "photos"), imported(here / "photos", fedlens)):
        assert found.classes == CLASSES
        assert (len(found.train), len(found.test)) == (6, 2)
        assert found.validation is None
        assert "client" not in found.train.columns and "site" not in found.train.columns


def test_a_part_to_train_on_alone_is_no_site(here, fedlens):
    write(here / "photos" / "train", CLASSES, count=5)
    for found in (folder(here / "photos"), imported(here / "photos", fedlens)):
        assert found.classes == CLASSES
        assert (len(found.train), len(found.test)) == (8, 2)
    assert not survey(here / "photos").sites


@pytest.mark.parametrize("outermost", [True, False])
def test_parts_stand_outside_or_inside_sites(here, fedlens, outermost):
    parts, sites = ("Train", "test"), ("north", "south")
    write(here / "p", *((parts, sites) if outermost else (sites, parts)), CLASSES)
    from_folder = folder(here / "p", layout="site/class")
    for found, column in ((from_folder, "site"), (imported(here / "p", fedlens), "client")):
        assert found.classes == CLASSES
        for part in (found.train, found.test):
            assert Counter(part.columns[column].tolist()) == {"north": 4, "south": 4}
            assert part.labels.bincount().tolist() == [4, 4]
    told = fedlens("import", "p", "--out", "y.toml", "-q").out
    assert "found parts, as folders are called: train 8, test 8\n" in told


@pytest.mark.parametrize("parts", [(), ("train", "test")])
@pytest.mark.parametrize("outermost", [True, False])
def test_a_class_may_be_empty_at_a_site_if_others_have_it(here, fedlens, parts, outermost):
    sites = ("north", "south")
    levels = [parts, sites] if outermost else [sites, parts]
    write(here / "photos", *[level for level in levels if level], CLASSES)
    for entry in (here / "photos").rglob("boot"):
        if "south" in entry.parts:
            [file.unlink() for file in entry.iterdir()]
    for found, column in (
        (folder(here / "photos", layout="site/class"), "site"),
        (imported(here / "photos", fedlens, "--layout", "site/class"), "client"),
    ):
        assert found.classes == CLASSES
        assert set(found.train.columns[column][found.train.labels == 1]) == {"north"}


@pytest.mark.parametrize("empty", ["south/hat", "west"])
def test_a_class_of_no_site_and_a_site_without_images_are_refused(here, empty):
    write(here / "photos", ("north", "south"), CLASSES)
    (here / "photos" / empty).mkdir()
    with pytest.raises(ValueError, match=f"{empty} has no images: add some or remove the folder"):
        folder(here / "photos", layout="site/class")


def test_what_folder_advises_never_trains_train_against_test(tmp_path):
    write(tmp_path, ("north", "south"), ("train", "test"), CLASSES)
    with pytest.raises(ValueError) as refused:
        folder(tmp_path)
    said = str(refused.value)
    assert "if north, south are sites, which hold the classes bag, boot, set layout" in said
    for layout, classes in (("site/class", CLASSES), ("class", ("north", "south"))):
        assert f'set layout = "{layout}"' in said
        found = folder(tmp_path, layout=layout)
        assert (found.classes, len(found.train), len(found.test)) == (classes, 8, 8)


def test_parts_inside_classes_are_read_if_somebody_says_so(here, fedlens):
    write(here / "p", CLASSES, ("train", "test"))
    with pytest.raises(ValueError, match="layout"):
        folder(here / "p")
    assert (
        "if bag, boot are the classes themselves, add --layout class" in fedlens("import", "p").err
    )
    for found in (
        folder(here / "p", layout="class"),
        imported(here / "p", fedlens, "--layout", "class"),
    ):
        assert (found.classes, len(found.train), len(found.test)) == (CLASSES, 4, 4)


def test_a_class_may_be_called_train_among_others(here, fedlens):
    write(here / "p", ("bus", "car", "train"), count=5)
    for found in (folder(here / "p"), imported(here / "p", fedlens)):
        assert found.classes == ("bus", "car", "train")
        assert (len(found.train), len(found.test)) == (12, 3)


@pytest.mark.parametrize(
    ("trees", "said"),
    [
        (
            ["north/train/bag", "north/test/bag", "south/bag"],
            "north is divided .*south is not: div",
        ),
        (["train/bag", "test/bag", "extra/bag"], "has test, train beside extra, .*: move one"),
        (["bag", "boot", "test"], "has test beside bag, boot, .* give the class another name"),
        (
            ["train/bag", "val/bag", "eval/bag"],
            "has eval and val, which both are for validation: put",
        ),
        (["train/bag", "Training/bag"], "has Training and train, which both are for train"),
        (["test/bag", "test/boot"], "has test and nothing to train on: add .*p/test itself"),
        (["train/bag", "train/boot", "test"], "test/0.png is in no folder of a class: put it into"),
        (["train", "test"], r"0.png is in no folder of a class: put it into one, or elsewhere"),
        (
            ["train/train/bag", "train/test/bag"],
            "p/train has test, train within it, and has",
        ),
        (["a/bag/train", "a/bag/test"], "bag/test is too deep for a part: put .* outermost"),
        (
            ["train/bag", "train/boot", "test/bag", "test/owl"],
            "owl/0.png is of class 'owl', .* add",
        ),
        (["train/bag", "train/boot", "test/boots"], "'boots', which .*: did you mean 'boot'"),
    ],
)
def test_what_cannot_be_told_is_refused_in_one_line_by_both(here, fedlens, trees, said):
    for tree in trees:
        write(here / "p" / tree, count=1)
    with pytest.raises(ValueError, match=said) as refused:
        folder(here / "p")
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=said):
        survey(here / "p")
    assert fedlens("import", "p").status == 2
    assert not Path("p.csv").exists() and not Path("p.toml").exists()


def test_a_class_of_which_only_test_images_can_be_decoded_is_refused(tmp_path):
    write(tmp_path, ("train", "test"), (*CLASSES, "owl"), count=1)
    (tmp_path / "train" / "owl" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="owl',"):
        survey(tmp_path)


def test_a_csv_file_with_a_class_in_test_alone_is_refused(tmp_path):
    write(tmp_path, CLASSES, count=2)
    rows = ["bag/0.png,bag,train", "bag/1.png,bag,test", "boot/0.png,owl,Testing"]
    (tmp_path / "p.csv").write_text("\n".join(["path,label,split", *rows]))
    with pytest.raises(ValueError, match=r"p\.csv:4.*owl"):
        DATASETS["csv"](Source(), path=str(tmp_path / "p.csv"))


def test_tiny_imagenet_as_published_is_pointed_to_its_data_set(here, fedlens):
    write(here / "tiny" / "train", ("n01", "n02"), ("images",))
    write(here / "tiny" / "val" / "images")
    (here / "tiny" / "val" / "val_annotations.txt").write_text("0.png\tn01\n1.png\tn02\n")
    ended = fedlens("import", "tiny")
    assert ended.status == 2 and 'set dataset = "tiny-imagenet"' in ended.err
    assert not Path("tiny.toml").exists()
    assert folder(here / "tiny", layout="class").test.labels.tolist() == [0, 1]


def test_validation_images_are_neither_trained_nor_tested_on(here, fedlens):
    write(here / "p", ("train",), CLASSES, count=4)
    write(here / "p", ("Valid",), CLASSES, count=3)
    write(here / "p", ("test",), CLASSES, count=2)
    told = fedlens("import", "p", "-q").out
    assert "p has 6 images for validation: they are neither trained nor tested on" in told
    with Path("p.csv").open() as file:
        splits = Counter(row["split"] for row in csv.DictReader(file))
    assert splits == {"train": 8, "validation": 6, "test": 4}
    for found in (folder(here / "p"), imported(here / "p", fedlens)):
        assert (len(found.train), len(found.test)) == (8, 4)
        assert found.validation is not None and len(found.validation) == 6


@pytest.mark.parametrize("form", ["folder", "csv"])
def test_own_validation_images_are_the_part_validation(here, fedlens, form):
    for part, count in (("train", 4), ("val", 3), ("test", 2)):
        write(here / "p" / part, CLASSES, count=count)
    assert fedlens("import", "p", "-q").status == 0
    path = {"folder": "p", "csv": "p.csv"}[form]
    plain = {
        "dataset": {"name": form, "path": str(here / path)},
        "model": "linear",
        "rounds": 1,
        "engine": "sequential",
        "clients": {"count": 2},
    }
    asked = fl.Experiment.of(plain | {"evaluate": {"on": ["test", "validation"]}})
    setup = build(asked)
    assert {name: len(part) for name, part in setup.parts.items()} == {"test": 4, "validation": 6}
    assert len(setup.federation.examples) == 8, "nothing of train is set apart"
    assert partition(asked)[2].sizes.sum() == 8
    assert {"test_accuracy", "validation_accuracy"} <= set(fl.run(asked).final)
    assert list(build(fl.Experiment.of(plain)).parts) == ["test"]


def test_validation_images_are_a_part_of_the_fingerprint(tmp_path):
    for part in ("train", "val", "test"):
        write(tmp_path / part, CLASSES)
    before = folder(tmp_path).digest
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "val" / "bag" / "0.png")
    assert folder(tmp_path).digest != before


def test_who_reads_validation_images_is_told_what_becomes_of_them(here, fedlens):
    for part in ("train", "val"):
        write(here / "p" / part, CLASSES, count=4)
    Path("a.toml").write_text(
        'dataset = { name = "folder", path = "p" }\nmodel = "linear"\nrounds = 1\n'
        'engine = "sequential"\nclients = { count = 2 }\n'
    )
    instead = "p has no test images: its 8 for validation are tested on"
    assert instead in fedlens("run", "a.toml", "--out", "one", "-q").err
    assert instead in fedlens("import", "p").out
    write(here / "p" / "test", CLASSES)
    said = 'are used where evaluate.on has "validation"'
    assert fedlens("run", "a.toml", "--out", "two", "-q").err.count(said) == 1


def test_import_counts_what_it_passed_over_in_one_line(here, fedlens):
    write(here / "p", ("north", "south"), CLASSES)
    (here / "p" / "north" / "owl").mkdir()
    (here / "p" / "west").mkdir()
    for name in ("readme.txt", "north/notes.TXT", "north/bag/1.heic", ".hidden", "LICENSE"):
        (here / "p" / name).write_text("x")
    lines = fedlens("import", "p", "-q").out.splitlines()
    assert [line for line in lines if line.startswith("skipped")] == [
        "skipped: 4 files that cannot be read as images (.txt 2, without ending 1, .heic 1), "
        "and 2 folders without images (west, north/owl)"
    ]
    write(here / "q", CLASSES)
    assert "skipped" not in fedlens("import", "q", "-q").out


def test_a_folder_of_other_files_says_which_there_are(here, fedlens):
    (here / "scans" / "bag").mkdir(parents=True)
    for name in ("1.svs", "2.svs", "notes.txt"):
        (here / "scans" / "bag" / name).write_text("x")
    ended = fedlens("import", "scans")
    assert (ended.status, ended.err) == (
        2,
        "fedlens: scans has no images that we read (.svs 2, .txt 1): name the folder that they are "
        "in, or save them as JPEG or PNG\n",
    )


def test_a_folder_around_the_classes_need_not_be_a_site(here, fedlens):
    write(here / "p", ("images",), CLASSES)
    told = fedlens("import", "p", "-q").out
    assert "assumed: images is a site, and the only one; else import p/images\n" in told
    write(here / "q", ("north", "south"), CLASSES)
    assert "the only one" not in fedlens("import", "q", "-q").out


def test_linked_folders_are_read_and_hidden_ones_and_circles_are_not(tmp_path):
    write(tmp_path / "elsewhere", ("bag",))
    write(tmp_path / "p", ("boot", ".trash"))
    (tmp_path / "p" / "bag").symlink_to(tmp_path / "elsewhere" / "bag")
    (tmp_path / "p" / "boot" / "round").symlink_to(tmp_path / "p")
    found = {file.relative_to(tmp_path / "p").as_posix() for file in images(tmp_path / "p")}
    assert found == {"bag/0.png", "bag/1.png", "boot/0.png", "boot/1.png"}


def test_a_link_to_an_image_that_is_not_here_is_named(here, fedlens):
    write(here / "p", CLASSES)
    (here / "p" / "bag" / "far.png").symlink_to(here / "unmounted" / "far.png")
    told = fedlens("import", "p", "-q").out
    assert "left out: p/bag/far.png cannot be decoded (No such file or directory)" in told
    with pytest.raises(ValueError, match=r"far\.png"):
        DATASETS["folder"](Source(), path="p")
