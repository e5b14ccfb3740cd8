"""What a site may have in its folder of images, and what it is told of the rest."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app_of
from fedlens.config.experiment import Experiment
from fedlens.data.folders import listed_by_class
from fedlens.fleet import CA, CACHE
from fedlens.fleet.join import join
from fedlens.fleet.keys import make_site_key
from fedlens.fleet.policy import FILE
from fedlens.fleet.site import Site
from fedlens.fleet.site_data import CHECKED, Checked, check_files, site_examples
from fedlens.fleet.terms import Terms, for_fleet
from fedlens.setup.data import load_dataset
from fedlens.storage.locks import one_writer
from tests.data.test_fit import write_photo
from tests.data.test_layouts import write
from tests.fleet.sites import TESTED, write_experiment


@pytest.fixture
def terms(tmp_path):
    """Of images 3×8×8 of the classes cat, dog, owl and yak."""
    experiment = for_fleet(Experiment.read(write_experiment(tmp_path)))
    return Terms.of(experiment, load_dataset(experiment.dataset, None))


def empty(place: Path) -> None:
    (place / "cat").mkdir(parents=True)


def listed(place: Path) -> None:
    place.write_text("path,label\n")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.mkdir, "photos has no class folders with images: put each class's images into"),
        (empty, "photos has no class folders with images: put each class's images into its own"),
        (listed, "photos is not a folder, a csv or .npz file: set --data to the site's examples"),
    ],
)
def test_a_site_without_images_is_told_before_it_looks_for_a_server(make, said, tmp_path):
    home, data = tmp_path / "ann", tmp_path / "photos"
    make_site_key(home, "ann")
    (home / CA).touch()
    make(data)
    with pytest.raises(ValueError, match=said):
        join(home, "ann", data, "127.0.0.1:1", "cpu", 0.0, print)


def test_decoded_images_are_kept_where_they_are_wanted_and_can_be_deleted(tmp_path, terms):
    photos, home = write(tmp_path / "photos", ("yak",)), tmp_path / "ann"
    site = Site(home, photos, keeps_decoded=False)
    site.approvals.approve(site.offer(terms, 0))
    order = {"experiment": terms.hash, "terms": terms.text, "client": 0}
    for where in (site, Site(home, photos)):
        assert not (home / CACHE).exists()
        assert where.answer("sizes", order, {}).facts["size"] == 2
    assert [*(home / CACHE).rglob("images.npy")]
    clean = ["fleet", "clean", str(home)]
    with one_writer(home):
        assert "is being written" in str(CliRunner().invoke(app_of(), clean).exception)
    assert CliRunner().invoke(app_of(), clean).output == f"deleted {home / CACHE}\n"
    assert not (home / CACHE).exists()
    assert "keeps no decoded images" in CliRunner().invoke(app_of(), clean).output


@pytest.mark.parametrize("cache", [True, False])
def test_a_site_that_is_interrupted_says_that_images_stay(cache, tmp_path, monkeypatch):
    def interrupted(place: Path, *_: object) -> None:
        if cache:
            (place / CACHE).mkdir()
        raise KeyboardInterrupt

    pytest.importorskip("flwr")
    make_site_key(tmp_path / "ann", "ann")
    (tmp_path / "ann" / CA).touch()
    monkeypatch.setattr("fedlens.fleet.join.join", interrupted)
    words = ["--server", "127.0.0.1:1", "--name", "ann", "--data", ".", "--home"]
    stop = CliRunner().invoke(app_of(), ["fleet", "join", *words, str(tmp_path / "ann")])
    assert (f"`fedlens fleet clean {tmp_path / 'ann'}`" in str(stop.exception)) == cache


@pytest.mark.parametrize("cache", [True, False])
def test_a_site_is_told_whether_a_site_keeps_images(cache, tmp_path, monkeypatch, fedlens):
    pytest.importorskip("flwr")
    from fedlens.fleet import worker

    given = list[str]()

    def started(home: Path, module: str, words: Sequence[object], *_: object, umask: int) -> None:
        given.extend(map(str, words))
        assert umask == 0o077, "others could read what it writes"
        raise KeyboardInterrupt

    home, photos = tmp_path / "ann", write(tmp_path / "photos", ("cat",))
    make_site_key(home, "ann")
    (home / CA).touch()
    monkeypatch.setattr("fedlens.fleet.flower.start", started)
    monkeypatch.setattr("fedlens.fleet.join.find_server", lambda *_: None)
    words = ["--server", "127.0.0.1:1", "--name", "ann", "--home", home, "--data", photos]
    assert fedlens("fleet", "join", *words, *[] if cache else ["--no-cache"]).status == 130
    site = worker.site_of(*given[1:])
    assert (site.home, site.data, site.keeps_decoded) == (home, photos, cache)


def test_what_others_sent_to_a_site_is_one_line_of_its_terminal(fedlens, tmp_path, monkeypatch):
    def told(*given: Any) -> None:
        notify = given[6]
        notify("refused: no\x1b[2J\nann: connected")

    pytest.importorskip("flwr")
    home = tmp_path / "ann"
    make_site_key(home, "ann")
    (home / CA).touch()
    monkeypatch.setattr("fedlens.fleet.join.join", told)
    photos = write(tmp_path / "photos", ("cat",))
    words = ["--server", "127.0.0.1:1", "--name", "ann", "--home", home, "--data", photos]
    assert fedlens("fleet", "join", *words).err == "ann: refused: no\\x1b[2J\\nann: connected\n"


def test_a_site_may_have_the_empty_folder_of_a_class(tmp_path, terms):
    photos = write(tmp_path / "photos", ("yak",))
    empty(photos)
    assert listed_by_class(photos).classes == ["yak"]
    assert site_examples(photos, terms, tmp_path / "cache").labels.tolist() == [3, 3]


def test_a_site_does_not_go_on_with_other_examples(tmp_path):
    """Of five examples one is held out, of four none: four are left to train on of both."""
    experiment = for_fleet(Experiment.read(write_experiment(tmp_path, holdout=0.2)))
    terms = Terms.of(experiment, load_dataset(experiment.dataset, None))
    photos = write(tmp_path / "photos", ("cat",), count=5)
    site = Site(tmp_path / "ann", photos)
    (site.home / FILE).parent.mkdir()
    (site.home / FILE).write_text(TESTED)
    site.approvals.approve(site.offer(terms, 0))
    order = {"experiment": terms.hash, "terms": terms.text, "client": 0}
    assert site.answer("sizes", order, {}).facts["size"] == 4
    shutil.copytree(photos, tmp_path / "copy")
    (photos / "cat" / "0.png").unlink()
    asked = {"experiment": terms.hash, "client": 0, "size": 4}
    said = "its examples are not those that it had when it was approved"
    assert site.answer("test", asked, {}).facts["refused"].startswith(said)
    copied = Site(site.home, tmp_path / "copy")
    assert said not in copied.answer("test", asked, {}).facts["refused"]  # but no model was sent


def test_a_class_that_the_experiment_has_not_gets_the_nearest(tmp_path, terms):
    photos = write(tmp_path / "photos", ("Cat", "dog"))
    with pytest.raises(ValueError, match=r"'Cat', which .* does not have: did you mean 'cat"):
        site_examples(photos, terms, tmp_path / "cache")


def test_a_site_is_told_no_option_that_it_has_not(tmp_path, terms):
    photos = write(tmp_path / "photos", ("cat",))
    for number in (0, 1):
        (photos / "cat" / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="2 images"):
        site_examples(photos, terms, tmp_path / "cache")


def as_listed(fedlens, photos: Path) -> Path:
    """The csv file that `fedlens import` writes of a folder."""
    out = photos.with_suffix(".toml")
    assert fedlens("import", photos, "--out", out).status == 0
    return out.with_suffix(".csv")


def test_a_site_may_have_the_csv_file_that_import_writes_without_broken_files(
    fedlens, tmp_path, terms
):
    photos = write(tmp_path / "photos", ("cat", "yak"), count=3)
    (photos / "cat" / "2.png").write_bytes(b"no image")
    listed = as_listed(fedlens, photos)
    held = site_examples(listed, terms, tmp_path / "cache")
    assert held.labels.tolist() == [0, 0, 3, 3, 3]
    with pytest.raises(ValueError, match=r"2\.png"):
        site_examples(photos, terms, None)


def test_files_are_checked_before_a_site_looks_for_a_server(fedlens, tmp_path, monkeypatch):
    def told(*given: Any) -> None:
        raise AssertionError("it went on")

    pytest.importorskip("flwr")
    home, photos = tmp_path / "ann", write(tmp_path / "photos", ("cat",), count=3)
    make_site_key(home, "ann")
    (home / CA).touch()
    (photos / "cat" / "1.png").write_bytes(b"no image")
    monkeypatch.setattr("fedlens.fleet.join.join", told)
    words = ["--server", "127.0.0.1:1", "--name", "ann", "--home", home, "--data", photos]
    refused = fedlens("fleet", "join", *words)
    assert refused.status == 2 and "cat/1.png" in refused.err


def test_images_behind_links_are_noticed_and_links_to_nowhere_named(tmp_path, terms):
    write(tmp_path / "elsewhere", ("cat",))
    photos = write(tmp_path / "photos", ("dog",))
    (photos / "cat").symlink_to(tmp_path / "elsewhere" / "cat")
    assert len(site_examples(photos, terms, tmp_path / "cache")) == 4
    write(tmp_path / "elsewhere", ("cat",), count=3)
    assert len(site_examples(photos, terms, tmp_path / "cache")) == 5
    (photos / "dog" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"gone\.png"):
        site_examples(photos, terms, tmp_path / "cache")


def test_a_site_fits_its_photos_as_the_server_does(tmp_path, terms):
    photos = tmp_path / "photos"
    write_photo(photos / "cat" / "0.jpg", 400, 200)
    data = replace(terms.content.data, fit="letterbox")
    boxed = Terms(replace(terms.content, data=data).text)
    assert terms.hash != boxed.hash and 'fit = "letterbox"' in "\n".join(boxed.describe())
    cache = tmp_path / "cache"
    for found, black in ((terms, False), (boxed, True), (terms, False)):
        images = site_examples(photos, found, cache).images
        assert bool((images[0, :, :2] < 30).all()) == black


def test_files_that_cannot_be_decoded_are_left_out_and_an_approval_says_so(
    tmp_path, terms, fedlens
):
    home, photos = tmp_path / "ann", write(tmp_path / "photos", ("cat", "dog"), count=3)
    home.mkdir()
    (photos / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"1\.png"):
        check_files(photos, home)
    assert not (home / CHECKED).exists()
    check_files(photos, home, "skip")
    site = Site(home, photos)
    order = {"experiment": terms.hash, "terms": terms.text, "client": 0}
    assert "not approved" in site.answer("sizes", order, {}).facts["refused"]
    told = fedlens("fleet", "approve", home, terms.hash[:12], "--yes").out
    assert "examples:  5 images here: cat 2, dog 3; left out" in told
    assert "cat/1.png (it is cut short, or no image)" in told
    assert site.answer("sizes", order, {}).facts["size"] == 5
    (photos / "dog" / "2.png").write_bytes(b"")  # one that was sound when it was approved
    assert "not those that it had" in site.answer("sizes", order, {}).facts["refused"]
    assert "join again" in fedlens("fleet", "approve", home, terms.hash[:12], "--yes").out
    listed = tmp_path / "listed.csv"
    listed.write_text("path,label,split\nphotos/cat/0.png,cat,train\nphotos/cat/2.png,cat,test\n")
    check_files(listed, home)
    checked = Checked.read(home)
    assert checked is not None and checked.classes == {"cat": 1}
    np.savez(tmp_path / "data.npz", x_train=np.zeros((1, 8, 8, 3), np.uint8), y_train=np.zeros(1))
    check_files(tmp_path / "data.npz", home)
    assert Checked.read(home) is None
