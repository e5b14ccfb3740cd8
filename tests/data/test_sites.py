"""Image files of several sites: which folders are sites, and what each is tested on."""

import csv
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ExifTags import Base

import fedlens as fl
from fedlens.data.arrays import held_out
from fedlens.data.pictures import Form, glance
from fedlens.data.pictures import read as read_pixels
from fedlens.data.survey import survey
from fedlens.report.holdings import client_rows
from fedlens.runs.records import read
from fedlens.setup import build, partition
from tests.sites import CLASSES, SIDES, write_sites


@pytest.fixture
def hospitals(tmp_path):
    return write_sites(tmp_path / "hospitals")


def described(place, **options):
    more = {key: options.pop(key) for key in ("clients", "norm", "rounds") if key in options}
    given = {"name": "folder", "path": str(place), "size": 8, "channels": 1} | options
    return fl.Experiment.of(
        {"dataset": given, "model": "linear", "rounds": 1, "engine": "sequential"} | more
    )


def test_folders_within_folders_are_refused_with_both_readings(hospitals):
    with pytest.raises(ValueError) as refused:
        build(described(hospitals))
    said = str(refused.value)
    assert "north, south, west are sites" in said and 'layout = "site/class"' in said
    assert "the classes bag, boot, trouser" in said and 'layout = "class"' in said
    assert build(described(hospitals, layout="class")).dataset.classes == tuple(SIDES)


def test_who_waits_for_images_is_told_how_many_are_decoded(hospitals):
    told: list[tuple[int, int]] = []
    build(described(hospitals, layout="site/class"), watch=lambda *of: told.append(of))
    assert told == [(done, 96) for done in range(1, 97)]
    looked: list[tuple[int, int]] = []
    survey(hospitals, watch=lambda *of: looked.append(of))
    assert looked == told


def test_sites_are_clients_and_have_test_images_of_their_own(hospitals):
    experiment = described(hospitals, layout="site/class")
    assert experiment.clients.partition == fl.Named("natural", {"column": "site"})
    setup = build(experiment)
    assert setup.dataset.classes == tuple(CLASSES)
    held = setup.federation.everyone(0)
    assert held.names == tuple(SIDES)
    counts = setup.federation.label_counts(held)
    assert counts[2].tolist()[2] == 0  # a class that a site does not have
    assert setup.client_tests is not None
    part, tested = setup.client_tests
    sites = setup.dataset.test.columns["site"]
    assert part == "test" and sorted(tested.index.tolist()) == list(range(len(sites)))
    for client, name in enumerate(SIDES):
        assert set(sites[tested.members(client).numpy()]) == {name}
    shares = tested.sizes / (tested.sizes + held.sizes)
    assert shares.tolist() == pytest.approx([0.2] * 3, abs=0.07)


def test_something_else_may_be_said(hospitals):
    other = described(hospitals, layout="site/class", clients={"count": 2, "partition": "iid"})
    assert build(other).client_tests is None
    assert partition(other)[2].sizes.tolist() == [39, 38]
    with pytest.raises(ValueError, match=r"clients\.count"):
        build(described(hospitals, layout="site/class", clients={"count": 7}))


def test_an_image_beside_the_classes_of_its_site_is_named(hospitals):
    (hospitals / "west" / "bag" / "0.jpg").rename(hospitals / "west" / "lost.jpg")
    with pytest.raises(ValueError, match=r"west/lost\.jpg"):
        build(described(hospitals, layout="site/class"))


def test_images_of_several_sizes_say_what_to_set(hospitals):
    with pytest.raises(ValueError, match="40×40"):
        build(described(hospitals, layout="site/class", size=None))


def listed(hospitals, column):
    rows = [
        [file.relative_to(hospitals).as_posix(), file.parts[-2], file.parts[-3]]
        for file in sorted(hospitals.rglob("*.jpg"))
    ]
    with (hospitals / "all.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", column], *rows])
    return {"name": "csv", "path": str(hospitals / "all.csv")}


def test_a_column_client_in_a_csv_file_is_the_clients(hospitals):
    experiment = described(hospitals, **listed(hospitals, "client"))
    assert experiment.clients.partition == fl.Named("natural", {"column": "client"})
    assert partition(experiment)[2].names == tuple(SIDES)


def test_another_column_is_asked_for_by_name(hospitals):
    given = listed(hospitals, "scanner")
    assert described(hospitals, **given).clients.partition.name == "iid"
    with pytest.raises(ValueError, match="scanner"):
        build(described(hospitals, **given, clients={"partition": "natural"}))


def test_each_site_gives_its_share_to_the_test():
    names = [
        f"{site}/{i}" for site, count in (("a", 100), ("b", 50), ("c", 20)) for i in range(count)
    ]
    sites = [name[0] for name in names]
    chosen = held_out(names, [0] * len(names), 0.2, sites)
    tested = Counter(site for site, test in zip(sites, chosen, strict=True) if test)
    assert tested == {"a": 20, "b": 10, "c": 4}
    alone = held_out(names, [0] * len(names), 0.2)
    assert sum(alone) == sum(chosen) == 34


def test_a_site_of_few_images_keeps_one_to_train_on():
    names = [f"{site}/{label}" for site in range(10) for label in (0, 1)]
    sites, labels = zip(*(name.split("/") for name in names), strict=True)
    whole = [int(label) for label in labels]
    plain, chosen = held_out(names, whole, 0.3), held_out(names, whole, 0.3, sites)
    kept = {site for site, test in zip(sites, chosen, strict=True) if not test}
    assert kept == set(sites)
    assert {site for site, test in zip(sites, plain, strict=True) if not test} < kept
    assert Counter(np.array(whole)[chosen].tolist()) == {0: 3, 1: 3}
    alone = held_out(names[::2], whole[::2], 0.3, sites[::2])
    assert sum(alone) == 3, "where nobody has a second image, some clients are tests alone"


def test_clients_by_another_column_give_their_share_and_keep_the_rest(hospitals):
    files = sorted(hospitals.rglob("*.jpg"))
    names = [file.relative_to(hospitals).as_posix() for file in files]
    classes = [file.parts[-2] for file in files]
    lost = held_out(names, [[*CLASSES].index(name) for name in classes], 0.2)
    scanners = ["old" if test else "new" for test in lost]  # what were tests, whoever had them
    with (hospitals / "all.csv").open("w", newline="") as file:
        rows = zip(names, classes, scanners, strict=True)
        csv.writer(file).writerows([["path", "label", "scanner"], *rows])
    natural = {"name": "natural", "column": "scanner"}
    given = {"name": "csv", "path": str(hospitals / "all.csv")}
    for clients in (natural, {"name": "shifted", "of": natural}):
        experiment = described(hospitals, **given, clients={"partition": clients})
        assert isinstance(experiment.dataset, fl.Named)
        assert experiment.dataset.options["client"] == "scanner"
        setup = build(experiment)
        held = setup.federation.everyone(0)
        assert held.names == ("new", "old")
        tested = Counter(setup.dataset.test.columns["scanner"].tolist())
        shares = [
            tested[name] / (tested[name] + n)
            for name, n in zip(held.names, held.sizes, strict=True)
        ]
        assert shares == pytest.approx([0.2, 0.2], abs=0.07)
    said = described(hospitals, **given, client="scanner")
    assert said.clients.partition == fl.Named("natural", {"column": "scanner"})
    with pytest.raises(ValueError, match="scaner"):
        build(described(hospitals, **given, client="scaner"))


@pytest.mark.parametrize("norm", ["shared", "local"])
def test_accuracy_by_site_is_that_of_its_test_images(hospitals, tmp_path, norm):
    model = {"shared": "linear", "local": "tests.data.test_sites:normed"}[norm]
    experiment = described(hospitals, layout="site/class", norm=norm)
    experiment = fl.Experiment.of(experiment.plain() | {"model": model})
    result = fl.run(experiment, tmp_path / "run")
    evaluation = read(tmp_path / "run").evaluation
    setup = build(experiment)
    assert setup.client_tests is not None
    tested = setup.client_tests.holdings
    assert evaluation["client_tested"] == tested.sizes.tolist()
    if norm == "shared":
        test = setup.dataset.test
        tensors = [result.model[name] for name in setup.network.params]
        params = dict(zip(setup.network.params, tensors, strict=True))
        right = setup.network.predict(params, {}, test.images).argmax(1) == test.labels
        own = [float(right[tested.members(k)].double().mean()) for k in range(3)]
        assert evaluation["client_accuracy"] == own
        total = np.dot(own, tested.sizes.numpy()) / len(test)
        assert total == pytest.approx(result.final["test_accuracy"])
    rows = client_rows(read(tmp_path / "run"))
    assert [row[0] for row in rows] == list(SIDES)
    assert all(row[4].count("%") == 2 for row in rows)


def normed(shape, num_classes):
    features = shape[0] * shape[1] * shape[2]
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(features), torch.nn.Linear(features, num_classes)
    )


def test_the_terminal_and_the_page_name_classes_and_sites(hospitals, here, fedlens):
    (here / "h.toml").write_text(described(hospitals, layout="site/class").toml())
    ended = fedlens("partition", "h.toml")
    assert "client  bag  boot  trouser  all" in ended.out
    assert [line.split() for line in ended.out.splitlines() if line.startswith("west")] == [
        ["west", "9", "10", "0", "19"]
    ]
    ended = fedlens("run", "h.toml")
    assert ended.status == 0
    assert "3 classes (bag, boot, trouser)" in ended.err
    assert "3 clients (north, south, west)" in ended.err
    assert any(line.startswith("south") and "% to " in line for line in ended.out.splitlines())
    page = (here / "runs" / "h" / "report.html").read_text()
    assert "Client by client" in page
    assert page.count("south") > 1


def photo(path, turned=1):
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    exif = Image.Exif()
    exif[Base.Orientation] = turned
    image = Image.fromarray(noise).resize((160, 120))
    image.save(path, exif=exif)
    return path


def test_a_look_at_a_jpeg_tells_its_own_size(tmp_path):
    for turned, size in ((1, (160, 120)), (3, (160, 120)), (6, (120, 160)), (8, (120, 160))):
        assert glance(photo(tmp_path / "a.jpg", turned)) == (size, False)
        assert read_pixels(tmp_path / "a.jpg", Form(channels=3)).shape == (size[1], size[0], 3)


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_a_look_finds_the_files_that_cannot_be_decoded(tmp_path, ending):
    path = photo(tmp_path / f"a.{ending}")
    whole = path.read_bytes()
    for share in (0.02, 0.2, 0.5, 0.9, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match="cannot be decoded") as in_full:
            read_pixels(path, Form(channels=3))
        with pytest.raises(ValueError, match=re.escape(str(in_full.value))):
            glance(path)


def test_one_spot_of_colour_in_gray_is_seen(tmp_path):
    for name, spot in (("gray", (90, 90, 90)), ("colour", (90, 90, 255))):
        image = Image.new("RGB", (64, 64), (90, 90, 90))
        image.paste(spot, (20, 20, 24, 24))
        for label in ("a", "b"):
            (tmp_path / name / label).mkdir(parents=True)
            image.save(tmp_path / name / label / "0.jpg", quality=95)
    assert survey(tmp_path / "gray").channels == 1
    assert survey(tmp_path / "colour").channels == 3


def test_a_look_at_one_class_alone_is_refused_and_folders_below_are_told(tmp_path):
    for place in ("north/bag/first", "north/bag/second"):
        (tmp_path / place).mkdir(parents=True)
        photo(tmp_path / place / "0.jpg")
    with pytest.raises(ValueError, match="bag"):
        survey(tmp_path)
    (tmp_path / "north" / "boot").mkdir()
    photo(tmp_path / "north" / "boot" / "0.jpg")
    assert survey(tmp_path).deeper == Path("north/bag/first")
    assert survey(tmp_path / "north").layout == "class"
    assert survey(tmp_path / "north").deeper == Path("bag/first")


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_a_file_of_examples_is_no_folder_but_a_data_set(tmp_path, kind):
    file = tmp_path / f"mine.{kind}"
    file.touch()
    remedy = rf'or set dataset = \{{ name = "{kind}", path = "{re.escape(str(file))}" \}}'
    with pytest.raises(ValueError, match=f"is not a folder: name one with images, {remedy}"):
        survey(file)
